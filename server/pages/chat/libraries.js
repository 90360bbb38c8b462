
// Libraries that only some answers need: fetched from this server when the first of them is drawn. The page's policy names the
// hash of each, so nothing else can come in this way.

const RETRY_LIBRARY_MS = 10000;
const libraries = new Map(); // name → { isThere, askedAt }
let afterLibrary = () => {};

/** Whether a library may be used now. If not, it is fetched, and what is shown is drawn again. */
function hasLibrary(name, globalName) {
  if (globalThis[globalName]) return true;
  const state = libraries.get(name);
  const isDue = !state || (state.hasFailed && performance.now() - state.askedAt > RETRY_LIBRARY_MS);
  if (isDue && typeof ask === "function") fetchLibrary(name);
  return false;
}

async function fetchLibrary(name) {
  const state = { askedAt: performance.now(), hasFailed: false };
  libraries.set(name, state);
  try {
    const text = await (await fetch(`${BASE}vendor/${name}.js`)).text();
    const script = element("script");
    script.textContent = text;
    document.head.append(script);
    script.remove();
    afterLibrary();
  } catch {
    state.hasFailed = true; // code stays without colours, formulas as they were written
  }
}
