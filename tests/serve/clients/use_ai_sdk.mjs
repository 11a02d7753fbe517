// The AI SDK's openai-compatible provider against a server. Prints what it got as one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "paceline",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  includeUsage: true,
});
const model = provider("local");
const prompt = "What is the weather?";
const tools = {
  weather: ai.tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `rain in ${city}`,
  }),
};
const stopWhen = (ai.isStepCount ?? ai.stepCountIs)(4);

const whole = await ai.generateText({ model, prompt, temperature: 0, maxOutputTokens: 50 });

const stream = ai.streamText({ model, prompt });
let streamed = "", pieces = 0;
for await (const piece of stream.textStream) {
  streamed += piece;
  pieces += 1;
}

const agent = await ai.generateText({ model, prompt, tools, stopWhen });

const streamedAgent = ai.streamText({ model, prompt, tools, stopWhen });
await streamedAgent.consumeStream();
const streamedSteps = await streamedAgent.steps;

const completion = await ai.generateText({ model: provider.completionModel("local"), prompt, maxOutputTokens: 50 });

const describe = (steps) =>
  steps.map((step) => ({
    text: step.text,
    calls: step.toolCalls.map((call) => [call.toolName, call.input]),
    results: step.toolResults.map((result) => result.output),
    finishReason: step.finishReason,
  }));
console.log(
  JSON.stringify({
    whole: whole.text,
    finishReason: whole.finishReason,
    usage: whole.usage,
    streamed,
    pieces,
    streamUsage: await stream.usage,
    agent: describe(agent.steps),
    streamedAgent: describe(streamedSteps),
    completion: completion.text,
  }),
);
