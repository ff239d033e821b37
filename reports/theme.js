"use strict";
document.documentElement.classList.add("js");
try {
  const chosen = localStorage.getItem("farm-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (error) { /* storage may be forbidden: follow the system */ }
