(() => {
  const faults = [];
  const say = (what, element) => faults.push(what + ": " + (element ? (element.outerHTML || element.textContent).slice(0, 160) : ""));
  document.querySelectorAll("details").forEach((e) => { e.open = true; });
  const shown = (e) => e.getClientRects().length > 0 && e.checkVisibility({ opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true });

  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  function rgba(text) {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = "#000";
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    return Array.from(context.getImageData(0, 0, 1, 1).data, (v) => v / 255);
  }
  const over = (top, below) => [0, 1, 2].map((k) => top[k] * top[3] + below[k] * (1 - top[3]));
  function paper(element) {
    const stack = [];
    for (let e = element; e; e = e.parentElement) {
      if (!(e instanceof SVGElement)) stack.push(rgba(getComputedStyle(e).backgroundColor));
    }
    return stack.reverse().reduce((below, top) => over(top, below), [1, 1, 1]);
  }
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => (v <= 0.04045 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4)));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);

  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.textContent.trim() || ["SCRIPT", "STYLE"].includes(e.tagName) || !shown(e)) continue;
    const style = getComputedStyle(e);
    const below = paper(e);
    const colour = rgba(e instanceof SVGElement ? style.fill : style.color);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const found = contrast(over(colour, below), below);
    texts += 1;
    if (found < (large ? 3 : 4.5)) say("contrast " + found.toFixed(2), e);
  }
  document.querySelectorAll(".line").forEach((e) => {
    if (!shown(e)) return;
    if (contrast(rgba(getComputedStyle(e).stroke), paper(e)) < 3) say("contrast of a line", e);
  });

  // Names, headings, ids.
  document.querySelectorAll("button, a, summary, input").forEach((e) => {
    const label = e.getAttribute("aria-label") || e.textContent.trim() || (e.labels && e.labels.length && e.labels[0].textContent);
    if (!label) say("no name", e);
    const box = e.getBoundingClientRect();
    if (shown(e) && e.tagName !== "A" && Math.min(box.width, box.height) < 23.5) say("small target " + box.width + "x" + box.height, e);
  });
  document.querySelectorAll("[role=img]").forEach((e) => {
    const words = (e.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id));
    if (words.some((one) => !one) || words.map((one) => one.textContent).join(" ").length < 25) say("a picture without words", e);
  });
  document.querySelectorAll("svg").forEach((e) => { if (!e.closest("[aria-hidden]") && e.getAttribute("role") !== "img" && e.getAttribute("aria-hidden") !== "true") say("svg without a role", e); });
  if (document.querySelectorAll("h1").length !== 1) say("not one h1");
  let level = 1;
  document.querySelectorAll("h1, h2, h3, h4").forEach((e) => {
    const own = Number(e.tagName[1]);
    if (own > level + 1) say("a heading level is left out", e);
    level = own;
  });
  const ids = Array.from(document.querySelectorAll("[id]"), (e) => e.id);
  ids.filter((id, place) => ids.indexOf(id) !== place).forEach((id) => faults.push("two elements named " + id));
  document.querySelectorAll("a[href^='#']").forEach((e) => { if (!document.getElementById(e.getAttribute("href").slice(1))) say("a link to nothing", e); });
  if (document.documentElement.lang !== "en" || !document.title || !document.querySelector("meta[name=viewport]")) say("lang, title or viewport");

  // Nothing leaves the page, nothing is cut off.
  if (document.documentElement.scrollWidth > window.innerWidth) say("the page scrolls sideways by " + (document.documentElement.scrollWidth - window.innerWidth));
  document.querySelectorAll("main section > *, .cards td, .cards th, .facts td, .chips > *").forEach((e) => {
    const box = e.getBoundingClientRect();
    if (shown(e) && (box.right > window.innerWidth + 0.5 || box.left < -0.5) && getComputedStyle(e).position !== "absolute" && !e.closest("thead")) say("outside", e);
  });
  document.querySelectorAll(".plot svg").forEach((svg) => {
    if (!shown(svg)) return;
    const frame = svg.getBoundingClientRect();
    const boxes = Array.from(svg.querySelectorAll("text")).map((e) => ({ e, box: e.getBoundingClientRect() }));
    boxes.forEach(({ e, box }) => { if (box.right > frame.right + 1 || box.left < frame.left - 1 || box.bottom > frame.bottom + 1 || box.top < frame.top - 1) say("cut off", e); });
    boxes.forEach((a, k) => boxes.slice(k + 1).forEach((b) => {
      const [x, y] = [Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left), Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top)];
      if (x > 1 && y > 4) say("texts overlap: " + a.e.textContent + " / " + b.e.textContent, a.e);
    }));
    const size = parseFloat(getComputedStyle(svg.querySelector("text")).fontSize) * frame.width / svg.viewBox.baseVal.width;
    if (size < 9.5) say("text of " + size.toFixed(1) + " px", svg.parentElement);
  });
  document.querySelectorAll("figure[data-chart]").forEach((e) => {
    if (Array.from(e.querySelectorAll(".plot svg")).filter(shown).length !== 1) say("not one layout is shown", e);
  });
  const focusable = Array.from(document.querySelectorAll("a[href], button, summary, input, [tabindex='0']")).filter(shown).length;
  return { faults, texts, focusable, charts: document.querySelectorAll("figure[data-chart]").length };
})()
