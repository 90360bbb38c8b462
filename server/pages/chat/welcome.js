
// What an empty chat says: which model this is, and what it can be asked.

const STARTERS = {
  "quire-demo": ["What is the capital of Peru?", "What is 7 times 8?", "What is Quire?", "What is the KV cache?", "Tell me a short story about a cat."],
  "": ["Explain what a KV cache is, in three sentences.", "Write a Python function that merges two sorted lists.",
    "Compare merge sort, quicksort and heapsort in a table.", "Give me three ideas for a rainy afternoon."],
};

/** model: as /v1/models has it; ask: what a click on a question does with it. */
function welcome({ id, max_model_len: numTokens }, ask) {
  const isDemo = id === "quire-demo";
  const context = numTokens ? `, with a context of ${numTokens.toLocaleString("en-US")} tokens` : "";
  setText(byId("welcome-title"), isDemo ? "Try it out" : "What can I do for you?");
  setText(byId("welcome-text"), isDemo
    ? "This is the built-in demo model, 8 million parameters: ask it about capitals, sums, Quire. It is often wrong."
    : `You talk with ${id}${context}.`);
  byId("starters").replaceChildren(...STARTERS[isDemo ? id : ""].map((text) => {
    const made = element("button", { type: "button" }, text);
    made.addEventListener("click", () => ask(text));
    return made;
  }));
}
