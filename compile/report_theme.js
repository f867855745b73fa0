// The button for light and dark; without it the page does as the system does.
"use strict";
(() => {
  const theme = document.getElementById("theme");
  const dark = () => {
    const set = document.documentElement.dataset.theme;
    return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  function showTheme() {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
  }
  theme.hidden = false;
  theme.onclick = () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    showTheme();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  showTheme();
})();
