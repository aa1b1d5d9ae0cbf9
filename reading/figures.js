// Figures to play with. Each starts with the numbers of a lesson: the page hands over the lesson's calls of a function,
// [[name, arguments, result], …]. What is in `compute` must give the same results; tests/test_reading.py sees to it.
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const flat = (x) => (Array.isArray(x) ? x.flat(9) : x);
const each = (x, i) => (Array.isArray(x) ? x[i] : x);
const short = (x) => String(+(+x).toFixed(3)).replace("-", "−");
const over = (c, value) => (c === 1 ? "" : `${short(c)} · `) + (value < 0 ? `(${short(value)})` : short(value));

const compute = {
  compute_gae(rewards, values, next, terminated, truncated, gamma, lambda) {
    const advantages = [];
    for (let t = rewards.length - 1, after = 0; t >= 0; t--) {
      const delta = rewards[t] + gamma * next[t] * !terminated[t] - values[t];
      after = advantages[t] = delta + gamma * lambda * !(terminated[t] || truncated[t]) * after;
    }
    return [advantages, advantages.map((A, t) => A + values[t])];
  },
  compute_vtrace(rewards, values, next, terminated, truncated, rho, c, gamma) {
    const advantages = [], targets = [];
    for (let t = rewards.length - 1, correction = 0; t >= 0; t--) { // v − V of the next step, 0 after an end
      const after = correction * !(terminated[t] || truncated[t]);
      const delta = rewards[t] + gamma * next[t] * !terminated[t] - values[t];
      advantages[t] = delta + gamma * after;
      correction = rho[t] * delta + gamma * c[t] * after;
      targets[t] = values[t] + correction;
    }
    return [advantages, targets];
  },
  policy_loss(logRatios, advantages, eps) {
    const objective = (r, A) => Math.min(r * A, clamp(r, 1 - eps, 1 + eps) * A);
    return -sum(logRatios.map((x, i) => objective(Math.exp(x), advantages[i]))) / logRatios.length;
  },
  td_targets(rewards, terminated, gamma, target, online) {
    const best = (qs) => qs.indexOf(Math.max(...qs));
    return rewards.map((r, i) => r + each(gamma, i) * !terminated[i] * target[i][best((online ?? target)[i])]);
  },
  project(rewards, terminated, gamma, probs, z) {
    const share = (y, i) => Math.max(0, 1 - Math.abs(clamp(y, z[0], z.at(-1)) - z[i]) / (z[1] - z[0]));
    const y = (b, j) => rewards[b] + each(gamma, b) * !terminated[b] * z[j];
    return probs.map((p, b) => z.map((_, i) => sum(p.map((pj, j) => pj * share(y(b, j), i)))));
  },
  NStepBuffer: class {
    constructor(capacity, observations, actions, device, envs, n, gamma) {
      Object.assign(this, { n, gamma, stored: [], open: Array.from({ length: envs }, () => []) });
    }
    add(obs, actions, rewards, terminated, truncated, resetRows, next) {
      this.open.forEach((steps, env) => {
        if (!resetRows[env]) steps.push([obs[env], actions[env], rewards[env]]);
        while (steps.length === this.n || (steps.length && (terminated[env] || truncated[env]))) {
          const [[first, action]] = steps, R = sum(steps.map(([, , r], k) => this.gamma ** k * r));
          const window = [first, action, R, next[env], terminated[env], this.gamma ** steps.length];
          this.stored.push([...window, env, steps.length]);
          steps.shift();
        }
      });
    }
    get(slots) { return [0, 1, 2, 3, 4, 5].map((field) => slots.map((slot) => this.stored[slot][field])); }
  },
  SumTree: class {
    constructor(capacity, alpha) { Object.assign(this, { alpha, p: Array(capacity).fill(0) }); }
    update(slots, errors) { slots.forEach((slot, i) => { this.p[slot] = (Math.abs(errors[i]) + 1e-6) ** this.alpha; }); }
    sample(size, rng, beta) { // one slot from the middle of each equal part of the sum
      const slots = Array.from({ length: size }, (_, i) => {
        let x = ((i + 0.5) / size) * sum(this.p), slot = 0;
        while (x >= this.p[slot]) x -= this.p[slot++];
        return slot;
      });
      const weights = slots.map((slot) => this.p[slot] ** -beta);
      return [slots, weights.map((w) => w / Math.max(...weights))];
    }
  },
  q_learning_target: (reward, discount, next) => reward + discount * Math.max(...next),
  sarsa_target: (reward, discount, next, action) => reward + discount * next[action],
  expected_sarsa_target: (reward, discount, next, epsilon) =>
    reward + discount * (epsilon * sum(next) / next.length + (1 - epsilon) * Math.max(...next)),
  double_q_target: (reward, discount, next, other) => reward + discount * other[next.indexOf(Math.max(...next))],
  make_candidates: (theta, noise, sigma) =>
    noise.flatMap((eps) => [1, -1].map((sign) => theta.map((x, i) => x + sign * sigma * eps[i]))),
  centered_ranks: (returns) => returns.map((a) =>
    (sum(returns.map((b) => (b < a) + (b <= a))) - 1) / 2 / (returns.length - 1) - 0.5),
  es_gradient: (fitnesses, noise, sigma) => noise[0].map((_, i) =>
    sum(noise.map((eps, k) => (fitnesses[2 * k] - fitnesses[2 * k + 1]) * eps[i])) / fitnesses.length / sigma),
  squashed_gaussian(mean, logStd, noise, halfRange) {
    const u = mean.map((row, b) => row.map((m, i) => m + Math.exp(logStd[b][i]) * noise[b][i]));
    const slope = (x, i) => Math.log(each(halfRange, i)) + 2 * (Math.log(2) - x - Math.log1p(Math.exp(-2 * x)));
    const density = (b, x, i) => -(noise[b][i] ** 2) / 2 - logStd[b][i] - Math.log(2 * Math.PI) / 2 - slope(x, i);
    return [u.map((row) => row.map(Math.tanh)), u.map((row, b) => sum(row.map((x, i) => density(b, x, i))))];
  },
};

// ------------------------------------------------------------------------------------------------------------ drawing
function svg(name, given, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in given) element.setAttribute(key, given[key]);
  element.textContent = text;
  return element;
}

// Bars for each of some steps: {name: values}; the chosen step stands out.
function bars(series, labels, chosen = -1) {
  const values = Object.values(series), top = Math.max(0.1, ...values.flat()), low = Math.min(0, ...values.flat());
  const scale = 150 / (top - low), zero = 24 + top * scale, width = 680 / labels.length;
  const size = Math.min(40, (width - 12) / values.length), out = [];
  labels.forEach((label, i) => {
    const left = 10 + i * width + (width - values.length * size) / 2, css = i === chosen ? "on" : "";
    Object.entries(series).forEach(([name, xs], k) => {
      const x = left + k * size, y = zero - Math.max(xs[i], 0) * scale, height = Math.abs(xs[i]) * scale;
      out.push(svg("rect", { x, y, width: size - 3, height, class: `s${k} ${css}` }));
      const above = { x: x + size / 2 - 1, y: (xs[i] < 0 ? y + height + 13 : y - 4), class: css };
      out.push(svg("text", above, size > 24 ? `${name} ${short(xs[i])}` : short(xs[i])));
    });
    out.push(svg("text", { x: 10 + (i + 0.5) * width, y: 212, class: `soft ${css}` }, label));
  });
  return [...out, svg("path", { d: `M0 ${zero}H700`, class: "axis" })];
}

// Lines through points, {class: [[x, y], …]}, in a picture of what lies between low and high; and a dot.
function lines(series, [x0, y0], [x1, y1], dot) {
  const at = ([x, y]) => [30 + 640 * (x - x0) / (x1 - x0), 200 - 185 * (clamp(y, y0, y1) - y0) / (y1 - y0)];
  const axes = `M${at([x0, 0])}L${at([x1, 0])}M${at([0, y0])}L${at([0, y1])}`;
  const ends = [x0, x1].map((x) => svg("text", { x: at([x, 0])[0], y: 215, class: "soft" }, short(x)));
  const paths = Object.entries(series).map(([css, points]) => svg("path", { d: `M${points.map(at).join("L")}`, class: css }));
  const [cx, cy] = at(dot);
  return [svg("path", { d: axes, class: "axis" }), ...ends, ...paths, svg("circle", { cx, cy, r: 5, class: "dot" })];
}

// Sliders {label: [least, most, first, step, names of the values]} and buttons {label: what it does} above a picture;
// draw(...values) returns [elements of the picture, a sentence below it].
function figure(place, title, sliders, draw, buttons = {}) {
  place.innerHTML = `<h4>Try it: ${title}</h4><svg viewBox="0 0 700 220" role="img"></svg><p aria-live="polite"></p>`;
  const [, picture, sentence] = place.children;
  const inputs = Object.entries(sliders).map(([label, [min, max, value, step = 0.05, names = []]]) => {
    const row = document.createElement("label"), range = `min="${min}" max="${max}" step="${step}" value="${value}"`;
    row.innerHTML = `${label} <input type="range" ${range}><output></output>`;
    place.insertBefore(row, picture);
    row.children[0].oninput = update;
    return { input: row.children[0], show: (x) => { row.children[1].textContent = names[x] ?? short(x); } };
  });
  for (const [label, action] of Object.entries(buttons)) {
    const button = Object.assign(document.createElement("button"), { textContent: label });
    button.onclick = () => { action(...inputs.map(({ input }) => +input.value)); update(); };
    place.insertBefore(button, picture);
  }
  function update() {
    inputs.forEach(({ input, show }) => show(+input.value));
    const [elements, text] = draw(...inputs.map(({ input }) => +input.value));
    picture.replaceChildren(...elements);
    sentence.innerHTML = text;
    picture.setAttribute("aria-label", sentence.textContent);
  }
  update();
}

const FIGURES = { // by the function beside which a figure stands, with the calls of the lessons
  compute_gae(place, [[, given]]) {
    const [r, V, next, terminated, truncated, gamma, lambda] = given.map(flat);
    const ends = r.map((_, t) => `t = ${t}${terminated[t] ? ", terminated" : truncated[t] ? ", truncated" : ""}`);
    const sliders = { γ: [0, 1, gamma], λ: [0, 1, lambda], t: [0, r.length - 1, 4, 1] };
    figure(place, "how far an advantage looks ahead", sliders, (γ, λ, t) => {
      const advantages = (λ) => compute.compute_gae(r, V, next, terminated, truncated, γ, λ)[0];
      const δ = advantages(0), A = advantages(λ), terms = [];
      for (let k = t, weight = 1; k < r.length && weight; k++) {
        terms.push(over(weight, δ[k]));
        weight *= γ * λ * !(terminated[k] || truncated[k]);
      }
      return [bars({ δ, A }, ends, t), `A<sub>${t}</sub> = ${terms.join(" + ")} = <b>${short(A[t])}</b>. The weights are
        the powers of γλ, up to the first end.`];
    });
  },
  compute_vtrace(place, [[, given]]) {
    const [r, V, next, terminated, truncated, rho, c, gamma] = given.map(flat), top = [Math.max(...rho), Math.max(...c)];
    const sliders = { "ρ at most": [0, top[0], top[0]], "c at most": [0, top[1], top[1]] };
    figure(place, "what the limits of V-trace do", sliders, (maxRho, maxC) => {
      const [ρ, C] = [rho.map((x) => Math.min(x, maxRho)), c.map((x) => Math.min(x, maxC))];
      const [A, v] = compute.compute_vtrace(r, V, next, terminated, truncated, ρ, C, gamma);
      const steps = r.map((_, t) => `ρ = ${short(ρ[t])}, c = ${short(C[t])}${terminated[t] ? ", terminated" : ""}`);
      return [bars({ V, v, A }, steps), `v = ${v.map(short).join(", ")}; A = ${A.map(short).join(", ")}. The limit of ρ
        decides which policy is evaluated; the limit of c only how far a correction reaches back.`];
    });
  },
  policy_loss(place, [[, [logs, advantages, eps]]]) {
    const i = logs.findIndex((x, k) => Math.exp(x) > 1 + eps && advantages[k] > 0);
    const sliders = { "ratio r": [0.2, 2, Math.exp(logs[i])], A: [-2, 2, advantages[i]], ε: [0.05, 0.5, eps] };
    figure(place, "where clipping takes the gradient away", sliders, (r, A, ε) => {
      const L = (x) => -compute.policy_loss([Math.log(x)], [A], ε), xs = Array.from(Array(181), (_, k) => 0.2 + k / 100);
      const way = (A > 0 ? r > 1 + ε : r < 1 - ε) ? "It is clipped: <b>no gradient</b>." :
        `The gradient makes the action ${A > 0 ? "more" : "less"} likely.`;
      const series = { thin: xs.map((x) => [x, x * A]), thick: xs.map((x) => [x, L(x)]) };
      return [lines(series, [0.2, -4], [2, 4], [r, L(r)]), `min(r A, clip(r) A) = min(${short(r * A)},
        ${short(clamp(r, 1 - ε, 1 + ε) * A)}) = <b>${short(L(r))}</b>. ${way}`];
    });
  },
  td_targets(place, calls) {
    const [[r], , gamma, [target], [online]] = calls.find(([, given]) => given[4])[1];
    const sliders = { "Q′(s′, 0)": target[0], "Q′(s′, 1)": target[1], "Q(s′, 0)": online[0], "Q(s′, 1)": online[1] };
    for (const label in sliders) sliders[label] = [-4, 10, sliders[label], 0.5];
    figure(place, "who chooses, and who judges", sliders, (t0, t1, q0, q1) => {
      const [dqn, double] = [null, [[q0, q1]]].map((online) => compute.td_targets([r], [false], gamma, [[t0, t1]], online)[0]);
      return [bars({ "Q′": [t0, t1], Q: [q0, q1] }, ["action 0", "action 1"], +(q1 > q0)), `DQN: ${short(r)} + ${gamma} ·
        max(${short(t0)}, ${short(t1)}) = <b>${short(dqn)}</b>. Double DQN: Q chooses action ${+(q1 > q0)}, Q′ judges
        it: ${short(r)} + ${over(gamma, q1 > q0 ? t1 : t0)} = <b>${short(double)}</b>.`];
    });
  },
  project(place, calls) {
    const [, [[r], , gamma, [p], z]] = calls.find(([, given]) => given[3][0].every((x) => x > 0)) ?? calls[0];
    figure(place, "a distribution, shifted and shared out", { r: [-3, 3, r], γ: [0, 1, gamma] }, (r, γ) => {
      const [m] = compute.project([r], [false], γ, [p], z), mean = (xs) => short(sum(xs.map((x, i) => x * z[i])));
      return [bars({ p, m }, z.map((x) => `z = ${short(x)}`)), `y = r + γ z = ${z.map((x) => short(r + γ * x)).join(", ")}.
        The mean of p is ${mean(p)}, that of m ${mean(m)}: it is r + γ · ${mean(p)}, unless a part is cut off at an end.`];
    });
  },
  NStepBuffer(place, [[, made], ...calls]) {
    const rows = calls.slice(0, calls.findIndex(([name]) => name.endsWith(".get"))).map(([, given]) => given);
    figure(place, "windows at an end", { n: [1, 4, made[5], 1], γ: [0, 1, made[6]] }, (n, γ) => {
      const buffer = new compute.NStepBuffer(...made.slice(0, 5), n, γ), out = [];
      rows.forEach((row, t) => {
        const before = buffer.stored.length, [, , rewards, terminated, truncated, resets] = row;
        buffer.add(...row);
        rewards.forEach((r, env) => {
          const text = resets[env] ? "reset" : `r = ${r}${terminated[env] ? ", terminated" : truncated[env] ? ", truncated" : ""}`;
          out.push(svg("text", { x: 90 + 170 * t, y: 18 + 110 * env, class: resets[env] ? "soft" : "on" }, text));
        });
        buffer.stored.slice(before).forEach(([, , R, , over, discount, env, length]) => {
          const x = 10 + 170 * (t - length + 1), y = 26 + 110 * env + 21 * (t - length + 1);
          out.push(svg("rect", { x, y, width: 170 * length - 10, height: 18, class: `s${env}` }));
          out.push(svg("text", { x: x + 85 * length - 5, y: y + 13 }, short(R) + (over ? "" : ` + ${short(discount)} V(s′)`)));
        });
      });
      return [out, `${buffer.stored.length} windows are complete. One that reaches a truncation bootstraps from the final
        observation; one that reaches a termination does not.`];
    });
  },
  SumTree(place, [[, [size, alpha]], [, [slots, errors]], [, [draws, , beta]]]) {
    figure(place, "priorities, and what they weigh", { α: [0, 1, alpha], β: [0, 1, beta] }, (α, β) => {
      const tree = new compute.SumTree(size, α);
      tree.update(slots, errors);
      const [drawn, weights] = tree.sample(draws, null, β), P = tree.p.map((x) => x / sum(tree.p));
      const w = slots.map((slot) => weights[drawn.indexOf(slot)] ?? 0);
      return [bars({ P, w }, errors.map((e, i) => `slot ${i}: error ${short(e)}`)), `P: the probability of a slot. w: its
        weight, in a batch of ${draws} draws, slots ${drawn.join(", ")}. α = 0 draws uniformly; β = 1 undoes the bias.`];
    });
  },
  q_learning_target(place, [[, [, gamma]], ...calls]) { // a cliff: 4 × 6 places, −1 a step, −100 and back to the start for a fall
    const epsilon = calls.find(([name]) => name === "expected_sarsa_target")[1][3];
    const moves = [[-1, 0], [0, 1], [1, 0], [0, -1]], arrows = "↑→↓←", draw = (x) => Math.floor(Math.random() * x);
    const methods = ["Q-learning", "Sarsa", "expected Sarsa"];
    let q, s, a, episodes, last;
    const best = (row) => row.map((x, i) => [x, i]).filter(([x]) => x === Math.max(...row)).map(([, i]) => i);
    const choose = (row, ε) => Math.random() < ε ? draw(4) : best(row)[draw(best(row).length)];
    const begin = () => { q = Array.from(Array(24), () => [0, 0, 0, 0]); s = 18; a = 0; episodes = 0; last = ""; };
    const step = (ε, α, γ, method) => {
      const row = clamp(Math.floor(s / 6) + moves[a][0], 0, 3), column = clamp(s % 6 + moves[a][1], 0, 5);
      const over = row === 3 && column === 5, fell = row === 3 && column > 0 && !over, R = fell ? -100 : -1;
      const S = fell ? 18 : 6 * row + column, A = choose(q[S], ε), discount = γ * !over;
      const target = [compute.q_learning_target(R, discount, q[S]), compute.sarsa_target(R, discount, q[S], A),
        compute.expected_sarsa_target(R, discount, q[S], ε)][method];
      const old = q[s][a];
      q[s][a] += α * (target - old);
      last = `Q(S, ${arrows[a]}) ← ${short(old)} + ${short(α)} · (${short(target)} − ${(old < 0 ? `(${short(old)})` : short(old))}) = <b>${short(q[s][a])}</b>.`;
      [s, a, episodes] = over ? [18, choose(q[18], ε), episodes + 1] : [S, A, episodes];
    };
    const play = (n) => (...given) => { for (const end = episodes + n; episodes < end;) step(...given); };
    begin();
    const sliders = { ε: [0.05, 1, epsilon], α: [0, 1, 0.5], γ: [0, 1, Math.max(gamma, 0.5)], target: [0, 2, 0, 1, methods] };
    const buttons = { "One step": step, "10 episodes": play(10), "100 episodes": play(100), "1,000 episodes": play(1000), "Begin anew": begin };
    figure(place, "a table that learns to walk along a cliff", sliders, () => {
      const cells = q.flatMap((row, i) => {
        const x = 110 + 80 * (i % 6), y = 5 + 53 * Math.floor(i / 6), value = Math.max(...row), isCliff = i > 18 && i < 23;
        return [svg("rect", { x, y, width: 77, height: 50, class: isCliff ? "bad" : i === 23 ? "s0" : "cell" }),
          svg("text", { x: x + 38, y: y + 22, class: "on" }, isCliff ? "cliff" : i === 23 ? "goal" : best(row).map((k) => arrows[k]).join("")),
          svg("text", { x: x + 38, y: y + 40, class: "soft" }, isCliff || i === 23 ? "" : short(value))];
      });
      const agent = svg("circle", { cx: 122 + 80 * (s % 6), cy: 17 + 53 * Math.floor(s / 6), r: 6, class: "dot" });
      return [[...cells, agent], `${episodes} episodes. ${last} Arrows: the best actions of the table; numbers: their values.`];
    }, buttons);
  },
  es_gradient(place, calls) {
    const [, [first, noise, sigma]] = calls.find(([name]) => name === "make_candidates"), goal = [0, 0];
    const F = ([x, y]) => -((x - goal[0]) ** 2) - 2 * (y - goal[1]) ** 2, at = ([x, y]) => [320 + 110 * x, 140 - 50 * y];
    const path = (css, points) => svg("path", { class: css, d: `M${points.map(at).join("L")}` });
    const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
    let trail, eps;
    const begin = () => { trail = [first]; eps = noise; };
    const next = (σ, α) => {
      const theta = trail.at(-1), ranks = compute.centered_ranks(compute.make_candidates(theta, eps, σ).map(F));
      return compute.es_gradient(ranks, eps, σ).map((g, i) => theta[i] + α * g);
    };
    const go = (σ, α) => { trail.push(next(σ, α)); eps = Array.from(Array(4), () => [normal(), normal()]); };
    begin();
    figure(place, "pairs, ranks and a step", { σ: [0.1, 1, sigma], α: [0.1, 1, 0.5] }, (σ, α) => {
      const theta = trail.at(-1), candidates = compute.make_candidates(theta, eps, σ), [cx, cy] = at(theta);
      const hills = [1, 2, 3].map((k) => svg("ellipse", { cx: at(goal)[0], cy: at(goal)[1], rx: 110 * k, ry: 35 * k, class: "axis" }));
      const pairs = eps.map((_, k) => path("thin", candidates.slice(2 * k, 2 * k + 2)));
      const ranks = compute.centered_ranks(candidates.map(F)).map((rank, i) =>
        svg("text", { x: at(candidates[i])[0], y: at(candidates[i])[1] + 4, class: "on" }, short(rank)));
      const dot = svg("circle", { cx, cy, r: 5, class: "dot" }), steps = path("thick", [...trail, next(σ, α)]);
      return [[...hills, ...pairs, steps, ...ranks, dot], `θ = (${theta.map(short).join(", ")}). The numbers are the centred
        ranks of the candidates θ ± σ ε: only their order counts. The step leads to (${next(σ, α).map(short).join(", ")}).`];
    }, { "Take the step": go, "Begin anew": begin });
  },
  squashed_gaussian(place, [[, [mean, logStd, , halfRange]]]) {
    const sliders = { mean: [-3, 3, mean[1][0]], σ: [0.1, 3, Math.exp(logStd[1][0])], "half range": [0.5, 2, flat(halfRange)[0]] };
    figure(place, "the density of a squashed Gaussian", sliders, (m, σ, h) => {
      const points = Array.from(Array(401), (_, i) => {
        const [[[a]], [log]] = compute.squashed_gaussian([[m]], [[Math.log(σ)]], [[(i - 200) / 50]], h);
        return [h * a, Math.exp(log)];
      });
      const [a, density] = points[200].map(short);
      return [lines({ thick: points }, [-2, 0], [2, 2.5], points[200]), `In the middle of the Gaussian, u = ${short(m)}, the
        action is ${a} and its density ${density}. A wide Gaussian piles up at the bounds.`];
    });
  },
};

for (const place of document.querySelectorAll("[data-figure]")) {
  FIGURES[place.dataset.figure](place, JSON.parse(place.textContent));
}
