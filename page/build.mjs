// Builds the page into quire/server/page: `make page`. The same sources give the same bytes on every machine.
// Another folder may be named: node build.mjs FOLDER.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const output = resolve(process.argv[2] ?? join(here, "../quire/server/page"));

/** Files under a folder, as paths with slashes, in the order of their names. */
function filesUnder(folder) {
  const found = readdirSync(folder, { withFileTypes: true, recursive: true }).filter((entry) => entry.isFile());
  return found.map((entry) => relative(here, join(entry.parentPath, entry.name)).replaceAll("\\", "/")).sort();
}

/** SHA-256 over the names and contents of all that the output is made of; tests/test_page.py recomputes it. */
function stamp() {
  const hash = createHash("sha256");
  for (const name of ["build.mjs", "package.json", "package-lock.json", "tsconfig.json", ...filesUnder(join(here, "src"))]) {
    const content = readFileSync(join(here, name));
    hash.update(`${name}\0${content.length}\0`);
    hash.update(content);
  }
  return hash.digest("hex");
}

/** The licences of the packages whose code is in the output. */
function licences(inputs) {
  const names = new Set();
  for (const input of inputs) {
    const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (found) names.add(found[1]);
  }
  const parts = ["The page is part of quire (Apache-2.0). Its script contains these packages."];
  for (const name of [...names].sort()) {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    parts.push(`${name} ${version} (${license})`, readFileSync(join(folder, "LICENSE"), "utf8").trim());
  }
  return `${parts.join("\n\n")}\n`;
}

rmSync(output, { recursive: true, force: true });
mkdirSync(output, { recursive: true });
const result = await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx" },
  outdir: output,
  bundle: true,
  format: "esm",
  target: ["es2022", "chrome110", "firefox115", "safari16.4"],
  minify: true,
  charset: "utf8",
  legalComments: "none",
  metafile: true,
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) cpSync(join(here, "src", name), join(output, name));
writeFileSync(join(output, "licences.txt"), licences(Object.keys(result.metafile.inputs)));
writeFileSync(join(output, "stamp.txt"), `${stamp()}\n`);
