// From a scored rollout to its advantages, as rlhf_nb.ui.what_if computes them. Plain numbers, no page.
// A row holds one number a column; an episode has `length` real tokens, and columns after that are padding.

// KL of one token: rlhf_nb.kl (Schulman, "Approximating KL divergence", 2020).
export const klOf = {
  k1: (logprob, ref) => logprob - ref,
  k2: (logprob, ref) => (logprob - ref) ** 2 / 2,
  k3: (logprob, ref) => Math.expm1(ref - logprob) - (ref - logprob),
  abs: (logprob, ref) => Math.abs(logprob - ref),
};

const sum = numbers => {  // Neumaier's: exact enough to agree with any order of adding
  let total = 0, lost = 0;
  for (const x of numbers) {
    const next = total + x;
    lost += Math.abs(total) >= Math.abs(x) ? total - next + x : x - next + total;
    total = next;
  }
  return total + lost;
};

// How many columns of an episode count: its tokens, and one more where the score has a slot of its own.
export const slotsOf = (length, width, slot) =>
  length > 0 && slot === "after_eos" ? Math.min(length + 1, width) : length;

// A standard deviation of 1 over the first counts[i] columns of every row: rlhf_nb.masks.whiten.
export const whiten = (rows, counts, shiftMean = true) => {
  const real = rows.flatMap((row, i) => row.slice(0, counts[i]));
  const mean = sum(real) / Math.max(real.length, 1);
  const variance = sum(real.map(x => (x - mean) ** 2)) / Math.max(real.length - 1, 1);
  const scale = 1 / Math.sqrt(variance + 1e-8), back = shiftMean ? 0 : mean;
  return rows.map((row, i) => row.map((x, t) => t < counts[i] ? (x - mean) * scale + back : 0));
};

// Generalised advantage estimates of one row: rlhf_nb.gae (Schulman et al. 2016, eq. 16).
export const gae = (rewards, values, count, gamma, lam) => {
  const advantages = rewards.map(() => 0);
  for (let t = count - 1, next = 0; t >= 0; t--) {
    const delta = rewards[t] + (t + 1 < count ? gamma * values[t + 1] : 0) - values[t];
    advantages[t] = next = delta + gamma * lam * next;
  }
  return advantages;
};

// Episodes with other settings. Each has length, stopped, raw, score, and the rows logprobs, refLogprobs, values
// and kl, all of one width. Whitening is over the episodes that are given: give all of an update.
export const whatIf = (episodes, recipe) => {
  const width = Math.max(0, ...episodes.map(e => e.values.length));
  const counts = episodes.map(e => slotsOf(e.length, width, recipe.reward_slot));
  const made = episodes.map((e, i) => {
    const kl = e.values.map((_, t) => t >= e.length ? 0
      : recipe.estimator === "stored" ? e.kl[t] : klOf[recipe.estimator](e.logprobs[t], e.refLogprobs[t]));
    const before = recipe.scores_from === "raw" ? e.raw : e.score;
    const score = e.stopped ? before : before - recipe.missing_eos_penalty;
    const rewards = kl.map((x, t) => t < e.length ? -recipe.kl_coef * x : 0);
    if (e.length) rewards[counts[i] - 1] += score;
    return {kl, score, rewards};
  });
  if (recipe.whiten_rewards) {
    const white = whiten(made.map(e => e.rewards), counts, false);
    made.forEach((e, i) => { e.rewards = white[i]; });
  }
  const raw = made.map((e, i) => gae(e.rewards, episodes[i].values, counts[i], recipe.gamma, recipe.lam));
  const advantages = whiten(raw, episodes.map(e => e.length));
  return made.map((e, i) => ({
    ...e, advantages: advantages[i],
    returns: raw[i].map((x, t) => t < counts[i] ? x + episodes[i].values[t] : 0),
  }));
};
