"""Packaging: everything is read from settings.ini."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    project_urls={
        "Documentation": f"{cfg['doc_host']}{cfg['doc_baseurl']}/",
        "Changes": f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md",
        "Issues": f"{cfg['git_url']}/issues",
    },
    keywords=cfg["keywords"].split(),
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Natural Language :: English",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: {x}" for x in cfg["tested_pythons"].split()),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=[*find_packages(include=["rlhf_nb", "rlhf_nb.*"]), "rlhf_nb.course"],
    package_dir={"rlhf_nb.course": "nbs/course"},  # which `rlhf-nb course` copies
    package_data={
        "rlhf_nb.course": ["*.ipynb"],
        "rlhf_nb": [
            "py.typed",
            "recipes/*",
            "ui/static/*",
            "cli/pages.json",
            "cli/starting_model/*",
        ],
    },
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        "dev": " ".join(cfg[f"{kind}_requirements"] for kind in ("dev", "docs", "real")).split(),
        "docs": cfg["docs_requirements"].split(),
        "peft": cfg["peft_requirements"].split(),
        "real": cfg["real_requirements"].split(),
        "tasks": cfg["tasks_requirements"].split(),
    },
    entry_points={"console_scripts": cfg["console_scripts"].split("\n")},
    zip_safe=False,
)
