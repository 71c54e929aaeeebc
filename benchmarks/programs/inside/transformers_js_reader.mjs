// Load the tokenizers with transformers.js, and the models that optimum-onnx converted.
//
// The arguments are request.json and a folder for the answers, as for the scripts in Python.

import fs from "node:fs";
import path from "node:path";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [requestFile, answerFolder] = process.argv.slice(2);
const request = JSON.parse(fs.readFileSync(requestFile, "utf-8"));
// The packages are in the folder of the environment, not next to this file.
const require = createRequire(path.join(request.environment, "package.json"));
const packageFile = require.resolve("@huggingface/transformers");
const library = await import(pathToFileURL(packageFile));
const { AutoModelForCausalLM, AutoTokenizer, Tensor, env } = library.default ?? library;

env.allowRemoteModels = false;
env.localModelPath = process.cwd();

/** Return the token ids, decoded texts and the text of a chat. */
async function readTokens(model) {
  const tokenizer = await AutoTokenizer.from_pretrained(model.path);
  const ids = model.texts.map((text) => tokenizer.encode(text));
  // An empty list cannot be decoded.
  const decoded = ids.map((row) => (row.length ? tokenizer.decode(row) : ""));
  const answer = { ids, decoded };
  if (model.chat) {
    const options = { tokenize: false, add_generation_prompt: true };
    const chat = tokenizer.apply_chat_template(model.chat, options);
    answer.chat = [chat];
    answer.chat_ids = [tokenizer.encode(chat, { add_special_tokens: false })];
  }
  return answer;
}

/** Return the likeliest tokens after each prompt. */
async function generate(model) {
  const options = { dtype: "fp32", subfolder: "", model_file_name: "model" };
  const network = await AutoModelForCausalLM.from_pretrained(`${model.path}-onnx`, options);
  const rows = [];
  for (const prompt of model.prompts) {
    const shape = [1, prompt.length];
    const inputs = {
      input_ids: new Tensor("int64", BigInt64Array.from(prompt.map(BigInt)), shape),
      attention_mask: new Tensor("int64", new BigInt64Array(prompt.length).fill(1n), shape),
    };
    const output = await network.generate({
      ...inputs,
      max_new_tokens: model.new_tokens,
      do_sample: false,
    });
    rows.push(Array.from(output.data, Number).slice(prompt.length));
  }
  return rows;
}

for (const model of request.models) {
  let answer;
  try {
    answer = await readTokens(model);
    if (fs.existsSync(`${model.path}-onnx`)) {
      answer.greedy = await generate(model);
    }
  } catch (error) {
    console.error(error);
    answer = { error: String(error).split("\n")[0] };
  }
  const folder = path.join(answerFolder, model.name);
  fs.mkdirSync(folder, { recursive: true });
  fs.writeFileSync(path.join(folder, "answer.json"), JSON.stringify(answer));
}
