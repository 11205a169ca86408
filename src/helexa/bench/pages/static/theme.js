// Before anything is painted: the theme that was chosen here last.
const kept = localStorage.getItem("theme");
if (kept) document.documentElement.dataset.theme = kept;
