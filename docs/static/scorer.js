/* Order of search results: guides before details, evidence, findings and design, troubleshooting first among equals; Chinese pages
   first for a Chinese question, which splitQuery sees, and last for any other. */
var Scorer = {
  chinese: false,
  score: function (result) {
    const page = result[0], score = result[4];
    if (/^zh-CN\//.test(page)) return Scorer.chinese ? score + 20 : score - 20;
    if (/^(findings|design)\//.test(page)) return score - 20;
    if (/^(details|evidence)\//.test(page)) return score - 10;
    if (/^reference\/command/.test(page)) return score - 1;
    if (/^(benchmarks|public-scripts|paper|examples|article-numbers|index|agents|exit-codes)$/.test(page)) return score - 1;
    return /^troubleshooting/.test(page) ? score + 6 : score;
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
