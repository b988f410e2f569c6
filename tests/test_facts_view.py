"Texts of the mini world with their facts marked."

from rlhf_nb.tldr import FACTS
from rlhf_nb.ui.facts import marked_texts

TRUTH = {slot: values[0] for slot, values in FACTS.items()}  # roommate broke guitar on monday


# catches: a false claim on the colour of a true one, a colour with no sign beside it
def test_a_claim_has_its_slot_and_a_sign():
    view = marked_texts({"one": "my roommate broke my car on monday."}, TRUTH)
    assert view.count("<mark") == 4 and view.count("✓") == 3 and view.count("✗") == 1
    assert repr(view) == "one my roommate ✓who broke ✓did my car ✗what on monday ✓when."
    true, false = (part.split(";")[0] for part in (view.split("<mark")[1], view.split("<mark")[3]))
    assert true != false


# catches: text that becomes markup, a label that does
def test_text_stays_text():
    view = marked_texts({"<b>x": "<script>\u202e & monday"}, TRUTH)
    assert "<script>" not in view and "<b>x" not in view and "&lt;script&gt;" in view
    assert "⟨U+202E⟩" in view


# catches: paragraphs of a post run into each other
def test_lines_of_a_post_stay_lines():
    assert marked_texts({"post": "TITLE: a\n\nPOST: b"}, TRUTH).count("\n") == 2
