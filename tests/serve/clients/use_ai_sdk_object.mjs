// The AI SDK asks a server for an object of a schema, in one piece and streamed. Prints what it got as one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, streamObject } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "paceline",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  supportsStructuredOutputs: true,
});
const asked = {
  model: provider("local"),
  schema: z.object({ city: z.enum(["Bern", "Rome"]), isRaining: z.boolean(), hours: z.array(z.enum(["am", "pm"])).length(2) }),
  prompt: "It rains in Bern all day. Describe the weather.",
  temperature: 0,
};

const whole = await generateObject(asked);
const stream = streamObject(asked);
let pieces = 0;
for await (const _ of stream.partialObjectStream) pieces += 1;
console.log(JSON.stringify({ whole: whole.object, streamed: await stream.object, pieces }));
