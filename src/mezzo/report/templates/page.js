(function () {
  "use strict";
  // Tables: numbers sort by their size, whatever their unit.
  const UNITS = { kflop: 1e3, mflop: 1e6, gflop: 1e9, tflop: 1e12, kib: 1024, mib: 1048576, gib: 1073741824, tib: 1099511627776, s: 1000, min: 60000 };

  function sortValue(text) {
    const power = /^(-?)2\^(-?\d+)/.exec(text);
    if (power) return Number(power[2]);
    const found = /^([+-]?[\d.]+(?:e[+-]?\d+)?|-?Infinity)[%x]?\s*([A-Za-z]*)/.exec(text);
    return found ? Number(found[1]) * (UNITS[found[2].toLowerCase()] || 1) : null;
  }

  function sortTable(table, head, column) {
    const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
    table.querySelectorAll("thead th").forEach((e) => e.setAttribute("aria-sort", e === head ? order : "none"));
    const rows = Array.from(table.tBodies[0].rows).map((row) => {
      const cell = row.cells[column];
      const text = cell ? cell.dataset.sort || cell.textContent.trim() : "";
      return { row, text, value: sortValue(text) };
    });
    rows.sort((a, b) => {
      if ((a.value === null) !== (b.value === null)) return a.value === null ? 1 : -1;
      const less = a.value === null ? a.text.localeCompare(b.text) : a.value - b.value;
      return order === "ascending" ? less : -less;
    });
    table.tBodies[0].append(...rows.map((one) => one.row));
  }

  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("thead th").forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const press = document.createElement("button");
      press.type = "button";
      press.append(...head.childNodes);
      press.addEventListener("click", () => sortTable(table, head, column));
      head.replaceChildren(press);
      head.setAttribute("aria-sort", "none");
    });
  });

  document.querySelectorAll("[data-filters]").forEach((input) => {
    const rows = Array.from(document.querySelectorAll("#" + input.dataset.filters + " tbody tr"));
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const count = document.getElementById("filtered");
    input.closest(".filters").hidden = false;
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, index) => { row.hidden = !words.every((word) => texts[index].includes(word)); });
      count.textContent = rows.filter((row) => !row.hidden).length + " of " + rows.length;
    });
  });

  document.querySelectorAll(".copy").forEach((press) => {
    press.hidden = false;
    press.addEventListener("click", () => {
      const code = press.parentElement.querySelector("code");
      getSelection().selectAllChildren(code);
      const done = (words) => {
        press.textContent = words;
        setTimeout(() => { press.textContent = "Copy"; }, 1500);
      };
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(() => done("Copied"), () => done("Selected"));
      else done(document.execCommand("copy") ? "Copied" : "Selected");
    });
  });

  window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((e) => { e.open = true; }));
})();
