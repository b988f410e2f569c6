// Pages before modules: a word of a page's text counts 5, a module that has it in its name 21.
var Scorer = {
  score: ([, , , description, score]) => score - (/^Python module/.test(description) ? 20 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
