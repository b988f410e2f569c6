// For those who read by keyboard or by ear: code that is wider than the page can be reached and scrolled, and the parts of the frame have names.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll("pre, .text_html, .table-wrapper")) if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "All pages");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  for (const caption of document.querySelectorAll(".sidebar-tree .caption[role=heading]")) caption.setAttribute("aria-level", "2");
});
