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

// Episodes with other settings. Each has length, stopped, unpenalized (its score before the penalty for a missing
// stop token), and the rows logprobs, refLogprobs, values and kl; if its tokens have scores, also the row earned.
// Whitening is over the episodes that are given: give all of an update. A setting that is not there has no effect; kl_estimator full takes the KL that is given.
export const whatIf = (episodes, recipe) => {
  const counts = episodes.map(e => e.length);
  const made = episodes.map(e => {
    const kl = e.values.map((_, t) => t >= e.length ? 0
      : recipe.kl_estimator === "full" ? e.kl[t] : klOf[recipe.kl_estimator](e.logprobs[t], e.refLogprobs[t]));
    const charge = e.stopped ? 0 : recipe.missing_eos_penalty ?? 0, score = e.unpenalized - charge;
    const rewards = kl.map((x, t) => t < e.length ? -(recipe.kl_coef ?? 0) * x + (e.earned?.[t] ?? 0) : 0);
    if (e.length) rewards[e.length - 1] += e.earned ? -charge : score;
    return {kl, score, rewards};
  });
  if (recipe.whiten_rewards) {
    const white = whiten(made.map(e => e.rewards), counts, false);
    made.forEach((e, i) => { e.rewards = white[i]; });
  }
  const alpha = recipe.lam_length_alpha;  // rlhf_nb.gae.lambda_of
  const lamOf = count => alpha ? Math.min(1, Math.max(0, 1 - 1 / (alpha * count))) : recipe.lam;
  const by = lam => made.map((e, i) => gae(e.rewards, episodes[i].values, counts[i], recipe.gamma, lam(counts[i])));
  const raw = by(lamOf), targets = recipe.lam_value == null ? raw : by(() => recipe.lam_value);
  const advantages = whiten(raw, counts);
  return made.map((e, i) => ({
    ...e, advantages: advantages[i],
    returns: targets[i].map((x, t) => t < counts[i] ? x + episodes[i].values[t] : 0),
  }));
};
