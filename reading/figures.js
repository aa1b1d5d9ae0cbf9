// Figures to play with. Each starts with the numbers of a lesson: the page hands over the lesson's calls of a function,
// [[name, {argument: value}, result], …]. What is in `compute` bears the scripts' names, and must give what the scripts
// gave in these calls; tests/test_reading.py sees to it.
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const best = (xs) => xs.indexOf(Math.max(...xs));
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const each = (x, i) => (Array.isArray(x) ? x[i] : x);
const flat = (given) => Object.fromEntries(Object.entries(given).map(([key, x]) => [key, x?.flat ? x.flat(9) : x]));
const short = (x) => String(+(+x).toFixed(3)).replace("-", "−");
const list = (xs) => xs.map(short).join(", ");

const compute = {
  compute_gae({ rewards, values, next_values, terminated, truncated, gamma, gae_lambda }) {
    const advantages = [];
    for (let t = rewards.length - 1, after = 0; t >= 0; t--) {
      const delta = rewards[t] + gamma * next_values[t] * !terminated[t] - values[t];
      after = advantages[t] = delta + gamma * gae_lambda * !(terminated[t] || truncated[t]) * after;
    }
    return [advantages, advantages.map((A, t) => A + values[t])];
  },
  compute_vtrace({ rewards, values, next_values, terminated, truncated, rho, c, gamma }) {
    const advantages = [], targets = [];
    for (let t = rewards.length - 1, correction = 0; t >= 0; t--) { // v − V of the next step, 0 after an end
      const after = correction * !(terminated[t] || truncated[t]);
      const delta = rewards[t] + gamma * next_values[t] * !terminated[t] - values[t];
      advantages[t] = delta + gamma * after;
      correction = rho[t] * delta + gamma * c[t] * after;
      targets[t] = values[t] + correction;
    }
    return [advantages, targets];
  },
  policy_loss({ log_ratios, advantages, clip_coef }) {
    const objective = (r, A) => Math.min(r * A, clamp(r, 1 - clip_coef, 1 + clip_coef) * A);
    return -sum(log_ratios.map((x, i) => objective(Math.exp(x), advantages[i]))) / log_ratios.length;
  },
  td_targets: ({ rewards, terminated, gamma, target_q, online_q }) => rewards.map((r, i) =>
    r + each(gamma, i) * !terminated[i] * target_q[i][best((online_q ?? target_q)[i])]),
  project({ rewards, terminated, discounts, probs, support: z }) {
    const share = (y, i) => Math.max(0, 1 - Math.abs(clamp(y, z[0], z.at(-1)) - z[i]) / (z[1] - z[0]));
    const y = (b, j) => rewards[b] + each(discounts, b) * !terminated[b] * z[j];
    return probs.map((p, b) => z.map((_, i) => sum(p.map((pj, j) => pj * share(y(b, j), i)))));
  },
  NStepBuffer: class {
    constructor({ num_envs, n_step, gamma }) {
      Object.assign(this, { n_step, gamma, stored: [], open: Array.from({ length: num_envs }, () => []) });
    }
    add({ obs, actions, rewards, next_obs, terminated, truncated, reset_rows }) {
      this.open.forEach((steps, env) => {
        if (!reset_rows[env]) steps.push([obs[env], actions[env], rewards[env]]);
        while (steps.length === this.n_step || (steps.length && (terminated[env] || truncated[env]))) {
          const [[first, action]] = steps, R = sum(steps.map(([, , r], k) => this.gamma ** k * r));
          const window = [first, action, R, next_obs[env], terminated[env], this.gamma ** steps.length];
          this.stored.push([...window, env, steps.length]);
          steps.shift();
        }
      });
    }
    get({ slots }) { return [0, 1, 2, 3, 4, 5].map((field) => slots.map((slot) => this.stored[slot][field])); }
  },
  SumTree: class {
    constructor({ capacity, alpha }) { Object.assign(this, { alpha, p: Array(capacity).fill(0) }); }
    update({ slots, errors }) {
      slots.forEach((slot, i) => { this.p[slot] = (Math.abs(errors[i]) + 1e-6) ** this.alpha; });
    }
    sample({ batch_size, beta }) { // one slot from the middle of each equal part of the sum
      const slots = Array.from({ length: batch_size }, (_, i) => {
        let x = ((i + 0.5) / batch_size) * sum(this.p), slot = 0;
        while (x >= this.p[slot]) x -= this.p[slot++];
        return slot;
      });
      const weights = slots.map((slot) => this.p[slot] ** -beta);
      return [slots, weights.map((w) => w / Math.max(...weights))];
    }
  },
  q_learning_target: ({ reward, discount, next_values }) => reward + discount * Math.max(...next_values),
  sarsa_target: ({ reward, discount, next_values, next_action }) => reward + discount * next_values[next_action],
  expected_sarsa_target: ({ reward, discount, next_values, epsilon }) =>
    reward + discount * (epsilon * sum(next_values) / next_values.length + (1 - epsilon) * Math.max(...next_values)),
  double_q_target: ({ reward, discount, next_values, other_next_values }) =>
    reward + discount * other_next_values[best(next_values)],
  make_candidates: ({ theta, noise, sigma }) =>
    noise.flatMap((eps) => [sigma, -sigma].map((size) => theta.map((x, i) => x + size * eps[i]))),
  centered_ranks: ({ returns }) => returns.map((a) =>
    (sum(returns.map((b) => (b < a) + (b <= a))) - 1) / 2 / (returns.length - 1) - 0.5),
  es_gradient: ({ fitnesses: F, noise, sigma }) => noise[0].map((_, i) =>
    sum(noise.map((eps, k) => (F[2 * k] - F[2 * k + 1]) * eps[i])) / F.length / sigma),
  squashed_gaussian({ mean, log_std, noise }) {
    const u = mean.map((row, b) => row.map((m, i) => m + Math.exp(log_std[b][i]) * noise[b][i]));
    const slope = (x) => 2 * (Math.log(2) - x - Math.log1p(Math.exp(-2 * x))); // its logarithm
    const log = (b, x, i) => -(noise[b][i] ** 2) / 2 - log_std[b][i] - Math.log(2 * Math.PI) / 2 - slope(x);
    return [u.map((row) => row.map(Math.tanh)), u.map((row, b) => sum(row.map((x, i) => log(b, x, i))))];
  },
};

// ------------------------------------------------------------------------------------------------------------ drawing
function svg(name, given, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in given) element.setAttribute(key, given[key]);
  element.textContent = text;
  return element;
}
const path = (css, points) => svg("path", { class: css, d: `M${points.join("L")}` });
const dot = ([cx, cy]) => svg("circle", { cx, cy, r: 5, class: "dot" });

// Bars for each of some steps: {name: values}; the chosen step stands out.
function bars(series, labels, chosen = -1) {
  const values = Object.values(series), top = Math.max(0.1, ...values.flat()), low = Math.min(0, ...values.flat());
  const scale = 150 / (top - low), zero = 24 + top * scale, width = 680 / labels.length;
  const size = Math.min(40, (width - 12) / values.length), out = [path("axis", [[0, zero], [700, zero]])];
  labels.forEach((label, i) => {
    const css = i === chosen ? "on" : "";
    Object.entries(series).forEach(([name, xs], k) => {
      const x = 10 + (i + 0.5) * width + (k - values.length / 2) * size, y = zero - Math.max(xs[i], 0) * scale;
      const height = Math.abs(xs[i]) * scale, label = { x: x + size / 2 - 1, y: xs[i] < 0 ? y + height + 13 : y - 4 };
      out.push(svg("rect", { x, y, width: size - 3, height, class: `s${k} ${css}` }));
      out.push(svg("text", { ...label, class: css }, size > 24 ? `${name} ${short(xs[i])}` : short(xs[i])));
    });
    out.push(svg("text", { x: 10 + (i + 0.5) * width, y: 212, class: css }, label));
  });
  return out;
}

// Lines through points, {class: [[x, y], …]}, in a picture of what lies between low and high; and a dot.
function lines(series, [x0, y0], [x1, y1], point) {
  const at = ([x, y]) => [30 + 640 * (x - x0) / (x1 - x0), 200 - 185 * (clamp(y, y0, y1) - y0) / (y1 - y0)];
  const ends = [x0, x1].map((x) => svg("text", { x: at([x, 0])[0], y: 215 }, short(x)));
  const axes = [[[x0, 0], [x1, 0]], [[0, y0], [0, y1]]].map((ends) => path("axis", ends.map(at)));
  const curves = Object.entries(series).map(([css, points]) => path(css, points.map(at)));
  return [...axes, ...ends, ...curves, dot(at(point))];
}

// Sliders {label: [least, most, first, step, names of the values]} and buttons {label: what it does} above a picture;
// draw(...values) returns [elements of the picture, a sentence below it].
function figure(place, title, sliders, draw, buttons = {}) {
  place.innerHTML = `<h4>Try it: ${title}</h4><svg viewBox="0 0 700 220" role="img"></svg><p aria-live="polite"></p>`;
  const [, picture, sentence] = place.children, values = () => inputs.map(({ input }) => +input.value);
  const inputs = Object.entries(sliders).map(([label, [min, max, value, step = 0.05, names = []]]) => {
    const row = document.createElement("label"), range = `min="${min}" max="${max}" step="${step}" value="${value}"`;
    row.innerHTML = `${label} <input type="range" ${range}><output></output>`;
    place.insertBefore(row, picture);
    const [input, output] = row.children;
    input.oninput = update;
    return { input, show: () => { output.textContent = names[input.value] ?? short(input.value); } };
  });
  for (const [label, action] of Object.entries(buttons)) {
    const button = Object.assign(document.createElement("button"), { textContent: label });
    button.onclick = () => { action(...values()); update(); };
    place.insertBefore(button, picture);
  }
  function update() {
    inputs.forEach(({ show }) => show());
    const [elements, text] = draw(...values());
    picture.replaceChildren(...elements);
    sentence.innerHTML = text;
    picture.setAttribute("aria-label", sentence.textContent);
  }
  update();
}
const end = (terminated, truncated) => (terminated ? ", terminated" : truncated ? ", truncated" : "");

const FIGURES = { // by the function beside which a figure stands, with the calls of the lessons
  compute_gae(place, [[, lesson]]) {
    const given = flat(lesson), { rewards, terminated, truncated, gamma, gae_lambda } = given;
    const labels = rewards.map((_, t) => `t = ${t}${end(terminated[t], truncated[t])}`);
    const sliders = { γ: [0, 1, gamma], λ: [0, 1, gae_lambda], t: [0, rewards.length - 1, 4, 1] };
    figure(place, "how far an advantage looks ahead", sliders, (γ, λ, t) => {
      const [δ, A] = [0, λ].map((x) => compute.compute_gae({ ...given, gamma: γ, gae_lambda: x })[0]), terms = [];
      for (let k = t, weight = 1; k < rewards.length && weight; k++) {
        terms.push((k > t ? `${short(weight)} · ` : "") + (δ[k] < 0 ? `(${short(δ[k])})` : short(δ[k])));
        weight *= γ * λ * !(terminated[k] || truncated[k]);
      }
      return [bars({ δ, A }, labels, t), `A<sub>${t}</sub> = ${terms.join(" + ")} = <b>${short(A[t])}</b>. The weights
        are the powers of γλ, up to the first end.`];
    });
  },
  compute_vtrace(place, [[, lesson]]) {
    const given = flat(lesson), [topRho, topC] = [Math.max(...given.rho), Math.max(...given.c)];
    const sliders = { "ρ at most": [0, topRho, topRho], "c at most": [0, topC, topC] };
    figure(place, "what the limits of V-trace do", sliders, (maxRho, maxC) => {
      const [rho, c] = [given.rho.map((x) => Math.min(x, maxRho)), given.c.map((x) => Math.min(x, maxC))];
      const [A, v] = compute.compute_vtrace({ ...given, rho, c }), V = given.values;
      const labels = rho.map((x, t) => `ρ = ${short(x)}, c = ${short(c[t])}${end(given.terminated[t])}`);
      return [bars({ V, v, A }, labels), `v = ${list(v)}; A = ${list(A)}. The limit of ρ decides which policy is
        evaluated; the limit of c only how far a correction reaches back.`];
    });
  },
  policy_loss(place, [[, { log_ratios, advantages, clip_coef }]]) {
    const i = log_ratios.findIndex((x, k) => Math.exp(x) > 1 + clip_coef && advantages[k] > 0);
    const r = Math.exp(log_ratios[i]), A = advantages[i];
    const sliders = { "ratio r": [0.2, 2, r], A: [-2, 2, A], ε: [0.05, 0.5, clip_coef] };
    figure(place, "where clipping takes the gradient away", sliders, (r, A, ε) => {
      const L = (x) => -compute.policy_loss({ log_ratios: [Math.log(x)], advantages: [A], clip_coef: ε });
      const xs = Array.from(Array(181), (_, k) => 0.2 + k / 100), isFlat = A > 0 ? r > 1 + ε : r < 1 - ε;
      const way = isFlat ? "It is clipped: <b>no gradient</b>." :
        `The gradient makes the action ${A > 0 ? "more" : "less"} likely.`;
      const series = { thin: xs.map((x) => [x, x * A]), thick: xs.map((x) => [x, L(x)]) };
      return [lines(series, [0.2, -4], [2, 4], [r, L(r)]), `min(r A, clip(r) A) = min(${short(r * A)},
        ${short(clamp(r, 1 - ε, 1 + ε) * A)}) = <b>${short(L(r))}</b>. ${way}`];
    });
  },
  td_targets(place, calls) {
    const [, lesson] = calls.find(([, given]) => given.online_q), { rewards: [r], gamma } = lesson;
    const { target_q: [target], online_q: [online] } = lesson;
    const sliders = { "Q′(s′, 0)": target[0], "Q′(s′, 1)": target[1], "Q(s′, 0)": online[0], "Q(s′, 1)": online[1] };
    for (const label in sliders) sliders[label] = [-4, 10, sliders[label], 0.5];
    figure(place, "who chooses, and who judges", sliders, (t0, t1, q0, q1) => {
      const step = { rewards: [r], terminated: [false], gamma, target_q: [[t0, t1]] }, chosen = best([q0, q1]);
      const [dqn, double] = [null, [[q0, q1]]].map((online_q) => compute.td_targets({ ...step, online_q })[0]);
      return [bars({ "Q′": [t0, t1], Q: [q0, q1] }, ["action 0", "action 1"], chosen), `DQN: ${short(r)} + ${gamma} ·
        max(${short(t0)}, ${short(t1)}) = <b>${short(dqn)}</b>. Double DQN: Q chooses action ${chosen}, and Q′ judges
        it: ${short(r)} + ${gamma} · ${short([t0, t1][chosen])} = <b>${short(double)}</b>.`];
    });
  },
  project(place, calls) {
    const isWide = ([, given]) => given.probs[0].every((x) => x > 0);
    const [, { rewards, discounts, probs: [p], support: z }] = calls.find(isWide) ?? calls[0];
    const sliders = { r: [-3, 3, rewards[0]], γ: [0, 1, each(discounts, 0)] };
    figure(place, "a distribution, shifted and shared out", sliders, (r, γ) => {
      const [m] = compute.project({ rewards: [r], terminated: [false], discounts: γ, probs: [p], support: z });
      const mean = (xs) => short(sum(xs.map((x, i) => x * z[i])));
      return [bars({ p, m }, z.map((x) => `z = ${short(x)}`)), `y = r + γ z = ${list(z.map((x) => r + γ * x))}. The
        mean of p is ${mean(p)}, that of m ${mean(m)}: it is r + γ · ${mean(p)}, unless a part is cut off at an end.`];
    });
  },
  NStepBuffer(place, [[, made], ...calls]) {
    const rows = calls.slice(0, calls.findIndex(([name]) => name.endsWith(".get"))).map(([, given]) => given);
    figure(place, "windows at an end", { n: [1, 4, made.n_step, 1], γ: [0, 1, made.gamma] }, (n_step, gamma) => {
      const buffer = new compute.NStepBuffer({ ...made, n_step, gamma }), out = [];
      rows.forEach((row, t) => {
        const before = buffer.stored.length;
        buffer.add(row);
        row.rewards.forEach((r, env) => {
          const text = row.reset_rows[env] ? "reset" : `r = ${r}${end(row.terminated[env], row.truncated[env])}`;
          out.push(svg("text", { x: 90 + 170 * t, y: 18 + 110 * env, class: row.reset_rows[env] ? "" : "on" }, text));
        });
        buffer.stored.slice(before).forEach(([, , R, , over, discount, env, length]) => {
          const x = 10 + 170 * (t - length + 1), y = 26 + 110 * env + 21 * (t - length + 1);
          const text = short(R) + (over ? "" : ` + ${short(discount)} V(s′)`);
          out.push(svg("rect", { x, y, width: 170 * length - 10, height: 18, class: `s${env}` }));
          out.push(svg("text", { x: x + 85 * length - 5, y: y + 13 }, text));
        });
      });
      return [out, `${buffer.stored.length} windows are complete. One that reaches a truncation bootstraps from the
        final observation; one that reaches a termination does not.`];
    });
  },
  SumTree(place, [[, made], [, { slots, errors }], [, draws]]) {
    const sliders = { α: [0, 1, made.alpha], β: [0, 1, draws.beta] };
    figure(place, "priorities, and what they weigh", sliders, (alpha, beta) => {
      const tree = new compute.SumTree({ ...made, alpha });
      tree.update({ slots, errors });
      const [drawn, weights] = tree.sample({ ...draws, beta }), P = tree.p.map((x) => x / sum(tree.p));
      const w = slots.map((slot) => weights[drawn.indexOf(slot)] ?? 0);
      return [bars({ P, w }, errors.map((e, i) => `slot ${i}: error ${short(e)}`)), `P: the probability of a slot. w:
        its weight, in a batch of ${drawn.length} draws, slots ${list(drawn)}. α = 0 draws uniformly; β = 1 undoes the
        bias.`];
    });
  },
  q_learning_target(place, [[, { discount }], ...calls]) { // 4 × 6 places; −1 a step, −100 for a fall to the start
    const [, { epsilon }] = calls.find(([name]) => name === "expected_sarsa_target"), cliff = (i) => i > 18 && i < 23;
    const methods = ["q_learning_target", "sarsa_target", "expected_sarsa_target"], arrows = "↑→↓←";
    const names = methods.map((name) => name.replace("_target", "").replaceAll("_", " "));
    const draw = (n) => Math.floor(Math.random() * n);
    const among = (row) => [0, 1, 2, 3].filter((i) => row[i] === Math.max(...row));
    const choose = (row, ε) => (Math.random() < ε ? draw(4) : among(row)[draw(among(row).length)]);
    let q, s, a, episodes, last;
    const begin = () => { q = Array.from(Array(24), () => [0, 0, 0, 0]); s = 18; a = 0; episodes = 0; last = ""; };
    const step = (ε, α, γ, method) => {
      const row = clamp(Math.floor(s / 6) + [-1, 0, 1, 0][a], 0, 3), column = clamp(s % 6 + [0, 1, 0, -1][a], 0, 5);
      const place = 6 * row + column, fell = cliff(place), over = place === 23, S = fell ? 18 : place;
      const next_action = choose(q[S], ε), old = q[s][a], value = old < 0 ? `(${short(old)})` : short(old);
      const given = { reward: fell ? -100 : -1, discount: γ * !over, next_values: q[S], next_action, epsilon: ε };
      const target = compute[methods[method]](given);
      q[s][a] += α * (target - old);
      last = `Q(S, ${arrows[a]}) ← ${short(old)} + ${short(α)} · (${short(target)} − ${value})
        = <b>${short(q[s][a])}</b>.`;
      [s, a, episodes] = over ? [18, choose(q[18], ε), episodes + 1] : [S, next_action, episodes];
    };
    const play = (n) => (...given) => { for (const until = episodes + n; episodes < until;) step(...given); };
    begin();
    const sliders = { ε: [0.05, 1, epsilon], α: [0, 1, 0.5], γ: [0, 1, discount], target: [0, 2, 0, 1, names] };
    const buttons = { "One step": step, "Begin anew": begin };
    for (const n of [10, 100, 1000]) buttons[`${n} episodes`] = play(n);
    figure(place, "a table that learns to walk along a cliff", sliders, () => {
      const cells = q.flatMap((row, i) => {
        const x = 110 + 80 * (i % 6), y = 5 + 53 * Math.floor(i / 6);
        const name = cliff(i) ? "cliff" : i === 23 ? "goal" : "";
        return [svg("rect", { x, y, width: 77, height: 50, class: name || "cell" }),
          svg("text", { x: x + 38, y: y + 22, class: "on" }, name || among(row).map((k) => arrows[k]).join("")),
          svg("text", { x: x + 38, y: y + 40 }, name ? "" : short(Math.max(...row)))];
      });
      const agent = dot([122 + 80 * (s % 6), 17 + 53 * Math.floor(s / 6)]);
      return [[...cells, agent], `${episodes} episodes. ${last} Arrows: the best actions of the table; numbers: their
        values.`];
    }, buttons);
  },
  es_gradient(place, calls) {
    const [, first] = calls.find(([name]) => name === "make_candidates");
    const at = ([x, y]) => [320 + 110 * x, 140 - 50 * y];
    const F = ([x, y]) => -(x ** 2) - 2 * y ** 2;
    const ranksOf = (candidates) => compute.centered_ranks({ returns: candidates.map(F) });
    const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
    let trail, noise;
    const begin = () => { trail = [first.theta]; noise = first.noise; };
    const next = (sigma, α) => {
      const theta = trail.at(-1), fitnesses = ranksOf(compute.make_candidates({ theta, noise, sigma }));
      return compute.es_gradient({ fitnesses, noise, sigma }).map((g, i) => theta[i] + α * g);
    };
    const go = (σ, α) => { trail.push(next(σ, α)); noise = Array.from(Array(4), () => [normal(), normal()]); };
    begin();
    figure(place, "pairs, ranks and a step", { σ: [0.1, 1, first.sigma], α: [0.1, 1, 0.5] }, (sigma, α) => {
      const theta = trail.at(-1), candidates = compute.make_candidates({ theta, noise, sigma }), [cx, cy] = at([0, 0]);
      const hills = [1, 2, 3].map((k) => svg("ellipse", { cx, cy, rx: 110 * k, ry: 35 * k }));
      const pairs = noise.map((_, k) => path("thin", candidates.slice(2 * k, 2 * k + 2).map(at)));
      const ranks = ranksOf(candidates).map((rank, i) => {
        const [x, y] = at(candidates[i]);
        return svg("text", { x, y: y + 4, class: "on" }, short(rank));
      });
      const steps = path("thick", [...trail, next(sigma, α)].map(at));
      return [[...hills, ...pairs, steps, ...ranks, dot(at(theta))], `θ = (${list(theta)}). The numbers are the centred
        ranks of the candidates θ ± σ ε: only their order counts. The step leads to (${list(next(sigma, α))}).`];
    }, { "Take the step": go, "Begin anew": begin });
  },
  squashed_gaussian(place, [[, { mean, log_std }]]) {
    const sliders = { mean: [-3, 3, mean[1][0]], σ: [0.1, 3, Math.exp(log_std[1][0])] };
    figure(place, "the density of a squashed Gaussian", sliders, (m, σ) => {
      const points = Array.from(Array(401), (_, i) => {
        const given = { mean: [[m]], log_std: [[Math.log(σ)]], noise: [[(i - 200) / 50]] };
        const [[[a]], [log]] = compute.squashed_gaussian(given);
        return [a, Math.exp(log)];
      });
      const [a, density] = points[200].map(short);
      return [lines({ thick: points }, [-1, 0], [1, 2.5], points[200]), `In the middle of the Gaussian, u = ${short(m)},
        the action is ${a} and its density ${density}. A wide Gaussian piles up at the bounds.`];
    });
  },
};

for (const place of document.querySelectorAll("[data-figure]")) {
  FIGURES[place.dataset.figure](place, JSON.parse(place.textContent));
}
