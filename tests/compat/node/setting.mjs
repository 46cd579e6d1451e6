// What tests/compat/setting.py is to scripts in Python: the setting, the shared questions, and how a script is run.

import { readFileSync } from "node:fs";

export const QUESTION = "What is the capital of France?";
export const CITIES = ["Paris", "London", "Tokyo"];
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES }, is_capital: { type: "boolean" } },
  required: ["city", "is_capital"],
  additionalProperties: false,
};
export const WEATHER_PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};
export const WEATHER = "rain, 9 degrees";
export const WEATHER_ANSWER = `The tool says: ${WEATHER}`;

// Tries every exercise, prints a line for each, and exits with 1 if one fails.
export async function run(exercises) {
  const setting = JSON.parse(readFileSync(process.argv[2], "utf8"));
  let failed = 0;
  for (const exercise of exercises) {
    try {
      await exercise(setting);
      console.log(`ok     ${exercise.name}`);
    } catch (error) {
      failed += 1;
      console.log(error);
      console.log(`FAILED ${exercise.name}`);
    }
  }
  console.log(`${exercises.length - failed} passed, ${failed} failed`);
  process.exit(failed ? 1 : 0);
}
