// What the site's own search answers: node site_search.js SITE < questions.json prints, for each question, its results as [page#anchor, title].
// The scripts are those of the built site, in the order of its search page; only what they ask of a browser is stood in for.
const fs = require("fs"), path = require("path"), vm = require("vm");
const statics = path.join(process.argv[2], "_static");
const element = () => ({ classList: { add() {} }, children: [], appendChild: (child) => child, setAttribute() {}, removeChild() {} });
const page = {
  console, URLSearchParams, localStorage: { setItem() {} }, location: { search: "" }, SPHINX_HIGHLIGHT_ENABLED: false, _: (text) => text,
  _ready() {}, document: { createElement: element, getElementById: element, querySelectorAll: () => [] },
};
page.window = page;
const context = vm.createContext(page);
for (const name of ["searchtools.js", "language_data.js", "../searchindex.js"])
  vm.runInContext(fs.readFileSync(path.join(statics, name), "utf8"), context, { filename: name });
page.questions = JSON.parse(fs.readFileSync(0, "utf8"));
const answers = vm.runInContext(
  "questions.map((q) => Search._performSearch(...Search._parseQuery(q)).reverse().map((r) => [r[0] + (r[2] || ''), r[1]]))", context);
process.stdout.write(JSON.stringify(answers));
