// Charts of metrics, whose logarithmic scales the button shows; a metric without one stays as it is.

{
  const button = byId("log-scale");
  if (button && "use" in button.dataset) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      for (const chart of document.querySelectorAll("figure.line")) {
        if (chart.querySelector(".log")) chart.dataset.scale = isLog ? "log" : "linear";
      }
      announce(isLog ? "Logarithmic scale" : "Linear scale");
    });
  }
}
