// Comfort only; every page can be read without it.

// A link to a line or function opens what is folded around it.
function unfold() {
  const element = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let e = element; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  element?.scrollIntoView();
}
addEventListener("hashchange", unfold);
if (location.hash) unfold();

// Pointing at a mistake marks its line.
for (const a of document.querySelectorAll(".wrong a")) {
  const line = document.getElementById(a.hash.slice(1));
  a.onmouseenter = a.onfocus = () => line?.classList.add("hot");
  a.onmouseleave = a.onblur = () => line?.classList.remove("hot");
}
