(function () {
  "use strict";
  const NS = "http://www.w3.org/2000/svg";
  const source = document.getElementById("chart-data");
  const data = source ? JSON.parse(source.textContent) : {};
  const hidden = new Set();

  function make(name, className, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function button(text, act, label) {
    const element = make("button", "", text);
    element.type = "button";
    if (label) element.setAttribute("aria-label", label);
    element.addEventListener("click", act);
    return element;
  }

  function shown(value, kind) {
    if (value === null || value === undefined) return "-";
    if (kind === "power") return "2^" + value;
    if (kind === "doubling") return String(Math.round(Math.pow(2, value)));
    const plus = value > 0 && (kind === "change" || kind === "signed") ? "+" : "";
    if (kind === "percent" || kind === "change") return plus + Number((100 * value).toPrecision(3)) + "%";
    return plus + Number(value.toPrecision(Number.isInteger(value) ? 15 : 4));
  }

  function along(x, kind) {
    return kind === "power" || kind === "doubling" ? shown(x, kind) : String(x);
  }

  // A policy is hidden in every chart of the page.
  function applyHidden() {
    document.querySelectorAll("[data-group]").forEach((e) => e.classList.toggle("off", hidden.has(e.dataset.group)));
    document.querySelectorAll(".keys button").forEach((e) => e.setAttribute("aria-pressed", String(!hidden.has(e.value))));
  }

  function makeKeys(figure) {
    figure.querySelectorAll("[data-key]").forEach((item) => {
      const key = item.dataset.key;
      const toggle = button("", () => {
        if (!hidden.delete(key)) hidden.add(key);
        applyHidden();
      });
      toggle.value = key;
      toggle.setAttribute("aria-pressed", "true");
      toggle.title = "Hide or show " + key;
      toggle.append(...item.childNodes);
      item.append(toggle);
    });
  }

  function ticksBetween(low, high, most) {
    const rough = (high - low) / most;
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = Math.max(1, power * [1, 2, 5, 10].find((size) => power * size >= rough));
    const ticks = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) ticks.push(at);
    return ticks;
  }

  function makeChart(figure) {
    const chart = data[figure.dataset.chart];
    const plot = figure.querySelector(".plot");
    const views = Array.from(plot.querySelectorAll("svg")).map((svg) => {
      const [left, top, right, bottom] = svg.dataset.frame.split(" ").map(Number);
      const ends = svg.dataset.ends.split(" ").map(Number);
      return { svg, left, top, right, bottom, ends, width: svg.viewBox.baseVal.width };
    });
    const whole = views[0].ends;
    let range = whole.slice();
    let place = -1;
    let began = null;
    const tip = make("div", "tip");
    tip.setAttribute("role", "status");
    tip.hidden = true;
    plot.append(tip);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", document.getElementById("title-" + figure.dataset.chart).textContent +
      ": left and right arrow keys move along the lines, plus and minus zoom");

    const view = () => views.find((v) => v.svg.getBoundingClientRect().width > 0) || views[0];
    const pixel = (v, x) => v.left + ((x - range[0]) / (range[1] - range[0])) * (v.right - v.left);

    function valueAt(v, clientX) {
      const box = v.svg.getBoundingClientRect();
      const unit = ((clientX - box.left) * v.width) / box.width;
      return range[0] + ((Math.min(Math.max(unit, v.left), v.right) - v.left) / (v.right - v.left)) * (range[1] - range[0]);
    }

    function nearest(x) {
      let best = 0;
      chart.x.forEach((at, index) => {
        if (Math.abs(at - x) < Math.abs(chart.x[best] - x)) best = index;
      });
      return best;
    }

    function put(v, name, tag, attributes) {
      let element = v.svg.querySelector("." + name);
      if (!element) {
        element = document.createElementNS(NS, tag);
        element.setAttribute("class", name);
        v.svg.append(element);
      }
      Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    }

    function hide() {
      place = -1;
      tip.hidden = true;
      plot.querySelectorAll(".cursor").forEach((e) => e.remove());
    }

    function heading(first, last) {
      const text = (x) => along(x, chart.xKind);
      return last > first ? chart.noun + "s " + text(first) + " to " + text(last) : chart.noun + " " + text(first);
    }

    function show(index) {
      place = Math.min(Math.max(index, 0), chart.x.length - 1);
      const v = view();
      const at = chart.x[place];
      const next = place + 1 < chart.x.length ? chart.x[place + 1] - 1 : chart.lastX;
      const last = chart.xKind === "power" || chart.xKind === "doubling" ? at : next;
      const across = pixel(v, at);
      put(v, "cursor", "path", { d: "M" + across + " " + v.top + "V" + v.bottom });
      tip.replaceChildren(make("b", "", heading(at, last)));
      chart.lines.filter((line) => !hidden.has(line.group)).forEach((line) => {
        const row = make("span", "s-" + line.style);
        row.append(make("i"), line.name + "  " + shown(line.y[place], chart.kind));
        if (line.low && line.low[place] !== null && line.low[place] !== line.high[place]) {
          row.append(" (" + shown(line.low[place], chart.kind) + " to " + shown(line.high[place], chart.kind) + ")");
        }
        tip.append(row);
        (line.marks || []).filter((mark) => mark[0] >= at && mark[0] <= last).slice(0, 4).forEach((mark) => {
          tip.append(make("span", "", line.name + ": " + mark[1]));
        });
      });
      tip.hidden = false;
      const share = across / v.width;
      tip.style.left = share < 0.5 ? "calc(" + 100 * share + "% + 12px)" : "auto";
      tip.style.right = share < 0.5 ? "auto" : "calc(" + 100 * (1 - share) + "% + 12px)";
    }

    function zoom(low, high) {
      const least = Math.min(4, whole[1] - whole[0]);
      if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
      range = [Math.max(low, whole[0]), Math.min(high, whole[1])];
      const all = range[0] <= whole[0] && range[1] >= whole[1];
      figure.classList.toggle("zoomed", !all);
      views.forEach((v) => {
        const size = v.right - v.left;
        const scale = (whole[1] - whole[0]) / (range[1] - range[0]);
        const shift = v.left - v.left * scale + ((whole[0] - range[0]) / (range[1] - range[0])) * size;
        v.svg.querySelectorAll(".moves").forEach((e) => e.setAttribute("transform", "translate(" + shift + " 0) scale(" + scale + " 1)"));
        v.svg.querySelectorAll("[data-x]").forEach((mark) => {
          const x = Number(mark.dataset.x) * scale + shift;
          mark.setAttribute("transform", "translate(" + x + " " + mark.dataset.y + ")");
          mark.style.visibility = x < v.left - 1 || x > v.right + 1 ? "hidden" : "";
        });
        v.svg.querySelectorAll(".zoom-tick").forEach((e) => e.remove());
        if (!all) ticksBetween(range[0], range[1], v.width > 600 ? 8 : 4).forEach((x) => {
          const text = document.createElementNS(NS, "text");
          text.setAttribute("class", "tick zoom-tick");
          text.setAttribute("text-anchor", "middle");
          text.setAttribute("x", pixel(v, x));
          text.setAttribute("y", v.bottom + 18);
          text.textContent = along(x, chart.xKind);
          v.svg.append(text);
        });
      });
      if (place >= 0) show(place);
    }

    function zoomBy(factor) {
      const middle = place >= 0 ? chart.x[place] : (range[0] + range[1]) / 2;
      const half = ((range[1] - range[0]) * factor) / 2;
      zoom(middle - half, middle + half);
    }

    const tools = make("div", "tools");
    tools.append(button("+", () => zoomBy(0.5), "Zoom in"), button("\u2212", () => zoomBy(2), "Zoom out"),
      button("All", () => zoom(whole[0], whole[1]), "Show all steps"));
    figure.querySelector(".bar-above").append(tools);

    plot.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch" && event.button === 0) began = valueAt(view(), event.clientX);
    });
    plot.addEventListener("pointermove", (event) => {
      const v = view();
      const at = valueAt(v, event.clientX);
      show(nearest(at));
      if (began === null) return;
      const [from, to] = [pixel(v, began), pixel(v, at)].sort((a, b) => a - b);
      put(v, "choice", "rect", { x: from, width: to - from, y: v.top, height: v.bottom - v.top });
    });
    window.addEventListener("pointerup", (event) => {
      if (began === null) return;
      const v = view();
      const at = valueAt(v, event.clientX);
      if (Math.abs(pixel(v, at) - pixel(v, began)) > 8) zoom(Math.min(began, at), Math.max(began, at));
      began = null;
      plot.querySelectorAll(".choice").forEach((e) => e.remove());
    });
    plot.addEventListener("pointerleave", () => began === null && hide());
    plot.addEventListener("dblclick", () => zoom(whole[0], whole[1]));
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const far = event.shiftKey ? 10 : 1;
      const acts = {
        ArrowLeft: () => show(place < 0 ? chart.x.length - 1 : place - far), ArrowRight: () => show(place + far),
        Home: () => show(0), End: () => show(chart.x.length - 1), Escape: hide,
        "+": () => zoomBy(0.5), "-": () => zoomBy(2), "0": () => zoom(whole[0], whole[1])
      };
      if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    });
  }

  document.querySelectorAll("figure[data-chart]").forEach((figure) => {
    makeKeys(figure);
    if (data[figure.dataset.chart]) makeChart(figure);
  });
})();
