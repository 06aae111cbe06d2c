// Loads the report anew every few seconds, without moving the page: not while it is hidden, while text is marked in it, or while somebody
// types in it. Whatever was unfolded stays so, and the focus where it was. The footer says how old the page is, and why it rests.
"use strict";

const report = document.getElementById("report");
const state = document.getElementById("state");
const seconds = report ? Number(report.dataset.refresh) : 0;
const isPhone = matchMedia("(max-width: 600px)").matches;
let loadedAt = Date.now();
let isLost = false;

function nameOf(details) {
  const summary = details.querySelector("summary");
  return summary ? summary.textContent : "";
}

function reasonToRest() {
  if (document.hidden) return "hidden";
  if (String(document.getSelection()) !== "") return "paused while text is marked";
  const active = document.activeElement;
  if (report.contains(active) && active.matches("input, select, textarea")) return "paused while you type";
  return "";
}

function tell() {
  if (!state) return;
  const age = Math.round((Date.now() - loadedAt) / 1000);
  const old = age < 120 ? `${age} s old` : `${Math.round(age / 60)} min old`;
  let mode = "";
  if (seconds > 0) mode = isLost ? ", the server doesn't answer" : ", " + (reasonToRest() || `live, every ${seconds} s`);
  state.textContent = `(${old}${mode})`;
}

function keepUnfolded(fresh) {
  const wasOpen = new Map();
  for (const each of report.querySelectorAll("details")) wasOpen.set(nameOf(each), each.open);
  for (const each of fresh.querySelectorAll("details")) {
    if (wasOpen.has(nameOf(each))) each.open = wasOpen.get(nameOf(each));
  }
}

async function refresh() {
  if (reasonToRest()) return;
  let answer;
  try {
    answer = await fetch(location.href);
  } catch {
    isLost = true;
    report.classList.add("stale");
    return;
  }
  // The session is over.
  if (answer.redirected) {
    location.reload();
    return;
  }
  isLost = !answer.ok;
  report.classList.toggle("stale", isLost);
  if (isLost || reasonToRest()) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("report");
  if (!fresh) return;
  keepUnfolded(fresh);
  const focused = report.contains(document.activeElement) ? [...report.querySelectorAll("a, summary")].indexOf(document.activeElement) : -1;
  report.replaceChildren(...fresh.childNodes);
  const again = report.querySelectorAll("a, summary")[focused];
  if (again) again.focus({ preventScroll: true });
  const footer = page.querySelector("#fresh span");
  if (footer) document.querySelector("#fresh span").textContent = footer.textContent;
  loadedAt = Date.now();
}

if (report && isPhone) for (const each of report.querySelectorAll("details.foldable")) each.open = false;
if (seconds > 0) setInterval(refresh, seconds * 1000);
tell();
setInterval(tell, 1000);

// Lists: what is ticked counts.
const list = document.getElementById("list");
const all = document.getElementById("all");

function countTicks() {
  const ticked = list.querySelectorAll("[name=tick]:checked").length;
  for (const each of list.querySelectorAll("[data-ticked]")) {
    each.disabled = ticked === 0;
    each.querySelector(".ticked").textContent = `(${ticked} selected)`;
  }
}

if (list && all) {
  all.addEventListener("change", () => {
    for (const each of list.querySelectorAll("[name=tick]")) each.checked = all.checked;
  });
  list.addEventListener("change", countTicks);
  countTicks();
}
