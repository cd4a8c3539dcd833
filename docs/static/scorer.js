/* Order of search results: guides before the pages of findings, of design and in Chinese, troubleshooting first among equals. */
var Scorer = {
  score: function (result) {
    const page = result[0], score = result[4];
    if (/^(findings|design|zh-CN)\//.test(page)) return score - 20;
    return page === "troubleshooting" ? score + 6 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
