// Runs the checks in JavaScript. A check is a function that throws an error if it fails.
import { appendFileSync } from "node:fs";

export const URL_ = process.env.OUTSIDE_URL;
export const MODEL = process.env.OUTSIDE_TOOLS;
const SETTINGS = JSON.parse(process.env.OUTSIDE_SETTINGS);
const CHECK_MS = 1000 * (SETTINGS.check_secs ?? 300);

export async function check(name, run) {
  const begun = Date.now();
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error("the check took too long")), CHECK_MS).unref());
  let outcome = "passed";
  let reason = "";
  try {
    await Promise.race([run(), late]);
  } catch (error) {
    console.error(name, error);
    outcome = "failed";
    reason = `${error?.name}: ${error?.message}`.slice(0, 400);
  }
  const seconds = Math.round((Date.now() - begun) / 100) / 10;
  appendFileSync(process.env.OUTSIDE_RESULTS, JSON.stringify({ name, outcome, reason, seconds }) + "\n");
}
