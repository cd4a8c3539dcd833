(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("figures").textContent);
  var places = document.querySelectorAll("[data-plot]");
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var narrow = window.matchMedia("(max-width: 640px)");

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function themed(layout) {
    var axis = { gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
    return Object.assign({}, layout, {
      font: { family: colour("--sans"), size: narrow.matches ? 12 : 13, color: colour("--soft") },
      hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
      // A finger that scrolls the page must not draw a zoom box.
      dragmode: narrow.matches ? false : "zoom",
      xaxis: Object.assign({}, layout.xaxis, axis),
      yaxis: Object.assign({}, layout.yaxis, axis)
    });
  }

  function draw(place) {
    var figure = figures[place.dataset.plot];
    var config = {
      responsive: true,
      displaylogo: false,
      displayModeBar: narrow.matches ? false : "hover",
      modeBarButtons: [figure.layout.yaxis.fixedrange ? ["toImage"] : ["toImage", "zoom2d", "pan2d", "resetScale2d"]]
    };
    Plotly.react(place, figure.data, themed(figure.layout), config);
  }

  function drawAll() {
    places.forEach(draw);
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
})();
