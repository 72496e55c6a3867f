// The adapters' view: which files are sent.
import assert from "node:assert/strict";
import { test } from "node:test";
import { choose, last, targetsInOrder } from "../src/adapters/files";

const chosen = (...paths: string[]) => paths.map((path) => ({ path, file: new Blob(["12345"]) }));
const sent = (...paths: string[]) => choose(chosen(...paths)).files.map(({ path }) => path);

test("a .zip is sent as it is, and names the adapter", () => {
  const parcel = choose(chosen("my.sql.ZIP"));
  assert.deepEqual([parcel.files.length, parcel.name, parcel.bytes, parcel.problem], [1, "my.sql", 5, null]);
});

test("files that were chosen one by one are all sent: the server says what is wrong with them", () => {
  assert.deepEqual(sent("adapter_config.json", "adapter_model.bin"), ["adapter_config.json", "adapter_model.bin"]);
  assert.deepEqual(sent("a.zip", "b.zip"), ["a.zip", "b.zip"]);
});

test("of a folder the two files of the adapter are sent, and those of its checkpoints are not", () => {
  const parcel = choose(chosen("sql/README.md", "sql/adapter_config.json", "sql/adapter_model.safetensors", "sql/checkpoint-5/adapter_config.json"));
  assert.deepEqual(parcel.files.map(({ path }) => path), ["sql/adapter_config.json", "sql/adapter_model.safetensors"]);
  assert.deepEqual(parcel.leftOut, ["sql/README.md", "sql/checkpoint-5/adapter_config.json"]);
  assert.deepEqual([parcel.name, parcel.bytes, parcel.problem], ["sql", 10, null]);
});

test("a folder around the adapter's own is looked into", () => {
  assert.deepEqual(sent("out/sql/adapter_config.json", "out/sql/adapter_model.safetensors", "out/x"), [
    "out/sql/adapter_config.json",
    "out/sql/adapter_model.safetensors",
  ]);
});

test("what cannot be sent has a reason", () => {
  assert.match(choose([]).problem ?? "", /no file/);
  assert.match(choose(chosen("sql/README.md")).problem ?? "", /no adapter_config.json/);
  assert.match(choose(chosen("sql/adapter_config.json", "sql/adapter_model.bin")).problem ?? "", /safetensors alone/);
  const two = choose(chosen("all/a/adapter_config.json", "all/b/adapter_config.json"));
  assert.match(two.problem ?? "", /2 adapters in it \(a, b\)/);
  assert.equal(two.files.length, 0);
});

test("targets stand with the many first", () => {
  assert.deepEqual(targetsInOrder({ b: 1, c: 6, a: 1 }).map(([name]) => name), ["c", "a", "b"]);
  assert.deepEqual([last("a/b"), last("b")], ["b", "b"]);
});
