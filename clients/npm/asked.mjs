// What the scripts of all packages share: what they are told on standard input, and what they ask for.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import * as z from "zod";

export const told = JSON.parse(readFileSync(0, "utf8"));

const colors = ["red", "green", "blue", "yellow", "purple", "orange", "black", "gray"];
const kinds = ["circle", "square", "triangle", "star"];
export const Shape = z.object({ shape: z.enum(kinds), color: z.enum(colors) });
export const Scene = z.object({ shapes: z.array(Shape) });
export const Draw = z.object({ shape: z.enum(kinds), color: z.string() });
export const Count = z.object({ kind: z.enum(kinds) });

export const checkScene = (found) => assert.deepEqual(Scene.parse(found), told.shapes);
export const checkStar = (found) => assert.deepEqual(found, told.star);

// The check's name is the argument.
export const check = async (checks) => await checks[process.argv[2]]();
