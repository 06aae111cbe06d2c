// Loads the report anew every few seconds, without moving the page: not while it is hidden, while text is marked in it, or while
// a finger or a key is at work in it. Whatever was unfolded stays so.
"use strict";

const report = document.getElementById("report");
const seconds = report ? Number(report.dataset.refresh) : 0;

function nameOf(details) {
  const summary = details.querySelector("summary");
  return summary ? summary.textContent : "";
}

function isBusy() {
  return document.hidden || String(document.getSelection()) !== "" || report.contains(document.activeElement);
}

async function refresh() {
  if (isBusy()) return;
  let answer;
  try {
    answer = await fetch(location.href);
  } catch {
    report.classList.add("stale");
    return;
  }
  // The session is over.
  if (answer.redirected) {
    location.reload();
    return;
  }
  report.classList.toggle("stale", !answer.ok);
  if (!answer.ok || isBusy()) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("report");
  if (!fresh) return;
  const wasOpen = new Map();
  for (const each of report.querySelectorAll("details")) wasOpen.set(nameOf(each), each.open);
  for (const each of fresh.querySelectorAll("details")) {
    if (wasOpen.has(nameOf(each))) each.open = wasOpen.get(nameOf(each));
  }
  report.replaceChildren(...fresh.childNodes);
}

if (seconds > 0) setInterval(refresh, seconds * 1000);
