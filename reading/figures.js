// Figures to play with. Each starts with the numbers of a lesson: the page hands over the lesson's calls
// of a function, [[name, {argument: value}, result], …]. What is in `compute` bears the scripts' names, and
// must give what the scripts gave in these calls; tests/test_reading.py sees to it.
const sum = (xs) => xs.reduce((a, b) => a + b, 0);
const best = (xs) => xs.indexOf(Math.max(...xs));
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const range = (n) => [...Array(n).keys()];
const short = (x) => String(+(+x).toFixed(3)).replace("-", "−");
const term = (x) => (x < 0 ? `(${short(x)})` : short(x)); // as a part of a sum
const list = (xs) => xs.map(short).join(", ");
const flat = (given) => // columns (T, 1) as rows
  Object.fromEntries(Object.entries(given).map(([name, x]) => [name, x?.flat ? x.flat(9) : x]));

const compute = {
  compute_vtrace({ rewards, values, next_values, terminated, truncated, rho, c, gamma }) {
    const advantages = [], targets = [];
    let correction = 0; // v − V of the next step, 0 after an end
    for (const t of range(rewards.length).reverse()) {
      const delta = rewards[t] + gamma * next_values[t] * !terminated[t] - values[t];
      if (terminated[t] || truncated[t]) correction = 0;
      advantages[t] = delta + gamma * correction;
      correction = rho[t] * delta + gamma * c[t] * correction;
      targets[t] = values[t] + correction;
    }
    return [advantages, targets];
  },
  compute_gae({ gae_lambda, ...step }) { // as V-trace's v − V, with rho = 1 and c = lambda
    const [rho, c] = [1, gae_lambda].map((x) => step.rewards.map(() => x));
    const [, returns] = compute.compute_vtrace({ ...step, rho, c });
    return [returns.map((R, t) => R - step.values[t]), returns];
  },
  policy_loss({ log_ratios, advantages, clip_coef }) {
    const objective = (r, A) => Math.min(r * A, clamp(r, 1 - clip_coef, 1 + clip_coef) * A);
    const objectives = log_ratios.map((x, i) => objective(Math.exp(x), advantages[i]));
    return -sum(objectives) / objectives.length;
  },
  td_targets: ({ rewards, terminated, gamma, target_q, online_q }) => rewards.map((r, i) =>
    r + (gamma[i] ?? gamma) * !terminated[i] * target_q[i][best((online_q ?? target_q)[i])]),
  project({ rewards, terminated, discounts, probs, support: z }) {
    const y = (b, j) => rewards[b] + (discounts[b] ?? discounts) * !terminated[b] * z[j];
    const distance = (x, i) => Math.abs(clamp(x, z[0], z.at(-1)) - z[i]) / (z[1] - z[0]);
    const share = (x, i) => Math.max(0, 1 - distance(x, i));
    return probs.map((p, b) => z.map((_, i) => sum(p.map((pj, j) => pj * share(y(b, j), i)))));
  },
  NStepBuffer: class {
    constructor({ num_envs, n_step, gamma }) {
      Object.assign(this, { n_step, gamma, stored: [], open: range(num_envs).map(() => []) });
    }
    add({ obs, actions, rewards, next_obs, terminated, truncated, reset_rows }) {
      this.open.forEach((steps, env) => {
        const isOver = terminated[env] || truncated[env];
        if (!reset_rows[env]) steps.push([obs[env], actions[env], rewards[env]]);
        while (steps.length === this.n_step || (steps.length && isOver)) {
          const R = sum(steps.map(([, , r], k) => this.gamma ** k * r)), n = steps.length;
          const [first, action] = steps.shift(), after = [next_obs[env], terminated[env]];
          this.stored.push([first, action, R, ...after, this.gamma ** n, env, n]);
        }
      });
    }
    get({ slots }) { return range(6).map((field) => slots.map((slot) => this.stored[slot][field])); }
  },
  SumTree: class {
    constructor({ capacity, alpha }) { Object.assign(this, { alpha, p: Array(capacity).fill(0) }); }
    update({ slots, errors }) {
      slots.forEach((slot, i) => { this.p[slot] = (Math.abs(errors[i]) + 1e-6) ** this.alpha; });
    }
    sample({ batch_size, beta }) { // one slot from the middle of each equal part of the sum
      const upTo = (slot) => sum(this.p.slice(0, slot + 1)), part = sum(this.p) / batch_size;
      const find = (x) => this.p.findIndex((_, slot) => upTo(slot) > x);
      const slots = range(batch_size).map((i) => find((i + 0.5) * part));
      const weights = slots.map((slot) => this.p[slot] ** -beta);
      return [slots, weights.map((w) => w / Math.max(...weights))];
    }
  },
  q_learning_target: ({ reward, discount, next_values: q }) => reward + discount * Math.max(...q),
  sarsa_target: ({ reward, discount, next_values: q, next_action }) => reward + discount * q[next_action],
  expected_sarsa_target: ({ reward, discount, next_values: q, epsilon }) =>
    reward + discount * (epsilon * sum(q) / q.length + (1 - epsilon) * Math.max(...q)),
  make_candidates: ({ theta, noise, sigma }) =>
    noise.flatMap((eps) => [sigma, -sigma].map((size) => theta.map((x, i) => x + size * eps[i]))),
  centered_ranks: ({ returns }) => returns.map((a) =>
    (sum(returns.map((b) => (b < a) + (b <= a))) - 1) / 2 / (returns.length - 1) - 0.5),
  es_gradient: ({ fitnesses: F, noise, sigma }) => noise[0].map((_, i) =>
    sum(noise.map((eps, k) => (F[2 * k] - F[2 * k + 1]) * eps[i])) / F.length / sigma),
  squashed_gaussian({ mean, log_std, noise }) {
    const u = mean.map((row, b) => row.map((m, i) => m + Math.exp(log_std[b][i]) * noise[b][i]));
    const log_gaussian = (b, i) => -(noise[b][i] ** 2 + Math.log(2 * Math.PI)) / 2 - log_std[b][i];
    const log_slope = (x) => 2 * (Math.log(2) - x - Math.log1p(Math.exp(-2 * x))); // of tanh
    const log_density = (row, b) => sum(row.map((x, i) => log_gaussian(b, i) - log_slope(x)));
    return [u.map((row) => row.map(Math.tanh)), u.map(log_density)];
  },
};

// ----------------------------------------------------------------------------------------- drawing
const text = (x, y, words, css = "") => `<text x="${x}" y="${y}" class="${css}">${words}</text>`;
const rect = (x, y, w, h, css) => `<rect x="${x}" y="${y}" width="${w}" height="${h}" class="${css}"/>`;
const path = (points, css = "") => `<path d="M${points.join("L")}" class="${css}"/>`;
const dot = ([x, y]) => `<circle cx="${x}" cy="${y}" r="5" class="dot"/>`;

// Bars for each of some steps: {name: values}; the chosen step stands out.
function bars(series, labels, chosen) {
  const all = Object.values(series).flat(), low = Math.min(0, ...all), high = Math.max(0.1, ...all);
  const at = (value) => 24 + 150 * (high - value) / (high - low), width = 700 / labels.length;
  const size = Math.min(56, (width - 12) * labels.length / all.length);
  const bar = ([name, xs], k, i) => {
    const x = (i + 0.5) * width + (k - all.length / labels.length / 2) * size;
    const y = at(Math.max(xs[i], 0)), height = at(Math.min(xs[i], 0)) - y, css = i === chosen ? "on" : "";
    const words = size > 24 ? `${name} ${short(xs[i])}` : short(xs[i]);
    return rect(x, y, size - 3, height, `s${k} ${css}`) +
      text(x + size / 2, xs[i] < 0 ? y + height + 13 : y - 4, words, css);
  };
  const column = (label, i) => Object.entries(series).map((entry, k) => bar(entry, k, i)).join("") +
    text((i + 0.5) * width, 212, label);
  return path([[0, at(0)], [700, at(0)]]) + labels.map(column).join("");
}

// Lines through points, {class: [[x, y], …]}, between two corners of the picture; and a dot. Label: of x.
function lines(label, series, [x0, y0], [x1, y1], point) {
  const height = (y) => 185 * (clamp(y, y0, y1) - y0) / (y1 - y0);
  const at = ([x, y]) => [30 + 640 * (x - x0) / (x1 - x0), 200 - height(y)];
  const all = { "": [[x0, 0], [x1, 0]], axis: [[0, y0], [0, y1]], ...series };
  return Object.entries(all).map(([css, points]) => path(points.map(at), css)).join("") +
    text(30, 215, short(x0)) + text(350, 215, label) + text(670, 215, short(x1)) + dot(at(point));
}

// Sliders {label: [least, most, first, step, names of the values]} and buttons {label: what it does} above
// a picture; draw(...values) returns [the picture, a sentence below it].
function figure(place, title, sliders, draw, buttons = {}) {
  const slider = ([label, [min, max, value, step = 0.05]]) => `<label>${label} <input type="range"
    min="${min}" max="${max}" step="${step}" value="${value}"><output></output></label>`;
  place.innerHTML = `<h4>Try it: ${title}</h4>${Object.entries(sliders).map(slider).join("")}
    ${Object.keys(buttons).map((label) => `<button>${label}</button>`).join("")}
    <div class="scroll" tabindex="0"><svg viewBox="0 0 700 220" role="img"></svg></div><p aria-live="polite"></p>`;
  const inputs = [...place.querySelectorAll("input")];
  const values = () => inputs.map((input) => +input.value);
  const [picture, sentence] = ["svg", "p"].map((name) => place.querySelector(name));
  place.oninput = () => {
    Object.values(sliders).forEach(([, , , , names], i) => {
      inputs[i].nextSibling.textContent = names?.[inputs[i].value] ?? short(inputs[i].value);
    });
    [picture.innerHTML, sentence.innerHTML] = draw(...values());
    picture.setAttribute("aria-label", sentence.textContent);
  };
  place.onclick = ({ target }) => {
    buttons[target.textContent]?.(...values());
    place.oninput();
  };
  place.oninput();
}
const end = (terminated, truncated) => (terminated ? ", terminated" : truncated ? ", truncated" : "");

const FIGURES = { // by the function beside which a figure stands, with the calls of the lessons
  compute_gae(place, [[, lesson]]) {
    const given = flat(lesson), { rewards, terminated, truncated, gamma, gae_lambda } = given;
    const labels = rewards.map((_, t) => `t = ${t}${end(terminated[t], truncated[t])}`);
    const sliders = { γ: [0, 1, gamma], λ: [0, 1, gae_lambda], t: [0, rewards.length - 1, 4, 1] };
    figure(place, "how far an advantage looks ahead", sliders, (γ, λ, t) => {
      const gae = (x) => compute.compute_gae({ ...given, gamma: γ, gae_lambda: x })[0];
      const δ = gae(0), A = gae(λ), terms = [];
      for (let k = t, weight = 1; k < rewards.length && weight; k++) {
        terms.push((k > t ? `${short(weight)} · ` : "") + term(δ[k]));
        weight *= γ * λ * !(terminated[k] || truncated[k]);
      }
      return [bars({ δ, A }, labels, t), `A<sub>${t}</sub> = ${terms.join(" + ")} =
        <b>${short(A[t])}</b>. The weights are the powers of γλ, up to the first end.`];
    });
  },
  compute_vtrace(place, [[, lesson]]) {
    const given = flat(lesson), [topRho, topC] = [given.rho, given.c].map((xs) => Math.max(...xs));
    const sliders = { "ρ at most": [0, topRho, topRho], "c at most": [0, topC, topC] };
    figure(place, "what the limits of V-trace do", sliders, (maxRho, maxC) => {
      const rho = given.rho.map((x) => Math.min(x, maxRho));
      const c = given.c.map((x) => Math.min(x, maxC));
      const [A, v] = compute.compute_vtrace({ ...given, rho, c });
      const labels = rho.map((x, t) => `ρ = ${short(x)}, c = ${short(c[t])}${end(given.terminated[t])}`);
      return [bars({ V: given.values, v, A }, labels), `v = ${list(v)}; A = ${list(A)}. The limit of ρ
        decides which policy is evaluated; the limit of c only how far a correction reaches back.`];
    });
  },
  policy_loss(place, [[, { log_ratios, advantages, clip_coef }]]) {
    const i = log_ratios.findIndex((x, k) => Math.exp(x) > 1 + clip_coef && advantages[k] > 0);
    const first = Math.exp(log_ratios[i]), ε = [0.05, 0.5, clip_coef];
    const sliders = { "ratio r": [0.2, 2, first], A: [-2, 2, advantages[i]], ε };
    figure(place, "where clipping takes the gradient away", sliders, (r, A, ε) => {
      const given = { advantages: [A], clip_coef: ε };
      const L = (x) => -compute.policy_loss({ log_ratios: [Math.log(x)], ...given });
      const xs = range(181).map((k) => 0.2 + k / 100), isFlat = A > 0 ? r > 1 + ε : r < 1 - ε;
      const series = { thin: xs.map((x) => [x, x * A]), thick: xs.map((x) => [x, L(x)]) };
      const way = isFlat || !A ? `${A ? "It is clipped" : "A is 0"}: <b>no gradient</b>.`
        : `The gradient makes the action ${A > 0 ? "more" : "less"} likely.`;
      return [lines("the ratio r; thin: r A", series, [0.2, -4], [2, 4], [r, L(r)]), `min(r A, clip(r) A) = min(${short(r * A)},
        ${short(clamp(r, 1 - ε, 1 + ε) * A)}) = <b>${short(L(r))}</b>. ${way}`];
    });
  },
  td_targets(place, calls) {
    const [, { rewards: [r], gamma, ...given }] = calls.find(([, { online_q }]) => online_q);
    const labels = ["Q′(s′, 0)", "Q′(s′, 1)", "Q(s′, 0)", "Q(s′, 1)"];
    const first = [...given.target_q[0], ...given.online_q[0]];
    const sliders = Object.fromEntries(labels.map((label, i) => [label, [-4, 10, first[i], 0.5]]));
    figure(place, "who chooses, and who judges", sliders, (...values) => {
      const target = values.slice(0, 2), Q = values.slice(2), chosen = best(Q);
      const step = { rewards: [r], terminated: [false], gamma, target_q: [target] };
      const [dqn] = compute.td_targets(step), [double] = compute.td_targets({ ...step, online_q: [Q] });
      return [bars({ "Q′": target, Q }, ["action 0", "action 1"], chosen), `DQN: ${short(r)} + ${gamma} ·
        max(${list(target)}) = <b>${short(dqn)}</b>. Double DQN: Q chooses action ${chosen}, and Q′ judges
        it: ${short(r)} + ${gamma} · ${term(target[chosen])} = <b>${short(double)}</b>.`];
    });
  },
  project(place, calls) {
    const isWide = ([, { probs: [p] }]) => p.every((x) => x > 0);
    const [, { rewards, discounts, probs: [p], support: z }] = calls.find(isWide) ?? calls[0];
    const sliders = { r: [-3, 3, rewards[0]], γ: [0, 1, discounts[0] ?? discounts] };
    figure(place, "a distribution, shifted and shared out", sliders, (r, γ) => {
      const step = { rewards: [r], terminated: [false], discounts: γ };
      const [m] = compute.project({ ...step, probs: [p], support: z });
      const mean = (xs) => short(sum(xs.map((x, i) => x * z[i])));
      const labels = z.map((x) => `z = ${short(x)}`), y = z.map((x) => r + γ * x);
      return [bars({ p, m }, labels), `y = r + γ z = ${list(y)}. The mean of p is ${mean(p)}, that of m
        ${mean(m)}: it is r + γ · ${mean(p)}, unless a part is cut off at an end.`];
    });
  },
  NStepBuffer(place, [[, made], ...calls]) {
    const end_of_rows = calls.findIndex(([name]) => name.endsWith(".get"));
    const rows = calls.slice(0, end_of_rows).map(([, given]) => given);
    const sliders = { n: [1, 4, made.n_step, 1], γ: [0, 1, made.gamma] };
    figure(place, "windows at an end", sliders, (n_step, gamma) => {
      const buffer = new compute.NStepBuffer({ ...made, n_step, gamma });
      const pictures = rows.map((row, t) => {
        const before = buffer.stored.length;
        buffer.add(row);
        const steps = row.rewards.map((r, env) => text(90 + 170 * t, 18 + 110 * env,
          row.reset_rows[env] ? "reset" : `r = ${r}${end(row.terminated[env], row.truncated[env])}`, "on"));
        const windows = buffer.stored.slice(before).map(([, , R, , isOver, discount, env, length]) => {
          const first = t - length + 1, x = 10 + 170 * first, y = 26 + 110 * env + 21 * first;
          const words = short(R) + (isOver ? "" : ` + ${short(discount)} Q′(s′, a*)`);
          return rect(x, y, 170 * length - 10, 18, `s${env}`) + text(x + 85 * length - 5, y + 13, words);
        });
        return [...steps, ...windows].join("");
      });
      return [pictures.join(""), `${buffer.stored.length} windows are complete. One that reaches a
        truncation bootstraps from the final observation; at a termination it does not.`];
    });
  },
  SumTree(place, [[, made], [, { slots, errors }], [, draws]]) {
    const sliders = { α: [0, 1, made.alpha], β: [0, 1, draws.beta] };
    figure(place, "priorities, and what they weigh", sliders, (alpha, beta) => {
      const tree = new compute.SumTree({ ...made, alpha });
      tree.update({ slots, errors });
      const [drawn, weights] = tree.sample({ ...draws, beta });
      const label = (e, i) => `slot ${i}: error ${short(e)}${drawn.includes(slots[i]) ? "" : ", not drawn"}`;
      const labels = errors.map(label);
      const P = tree.p.map((x) => x / sum(tree.p)), w = slots.map((slot) => weights[drawn.indexOf(slot)] ?? 0);
      return [bars({ P, w }, labels), `P: the probability of a slot. w: its weight, in a batch of
        ${drawn.length} draws, slots ${list(drawn)}. α = 0 draws uniformly; β = 1
        weighs by 1 / P, divided by the largest weight of the batch.`];
    });
  },
  q_learning_target(place) { // 4 × 6 places; −1 a step, −100 for a fall
    const methods = ["q_learning", "sarsa", "expected_sarsa"], arrows = "↑→↓←";
    const isCliff = (i) => i > 18 && i < 23;
    const greedy = (i) => range(4).filter((k) => q[i][k] === Math.max(...q[i]));
    const draw = (xs) => xs[Math.floor(Math.random() * xs.length)];
    const choose = (i, ε) => draw(Math.random() < ε ? range(4) : greedy(i));
    let q, s, a, episodes, last;
    const begin = () => {
      [q, s, a, episodes, last] = [range(24).map(() => [0, 0, 0, 0]), 18, 0, 0, ""];
    };
    const step = (ε, α, γ, method) => {
      const row = clamp(Math.floor(s / 6) + [-1, 0, 1, 0][a], 0, 3);
      const column = clamp(s % 6 + [0, 1, 0, -1][a], 0, 5), to = 6 * row + column, isOver = to === 23;
      const next = isCliff(to) ? 18 : to, next_action = choose(next, ε), old = q[s][a];
      const given = { reward: isCliff(to) ? -100 : -1, discount: γ * !isOver, next_values: q[next] };
      const target = compute[`${methods[method]}_target`]({ ...given, next_action, epsilon: ε });
      q[s][a] += α * (target - old);
      last = `Q(S, ${arrows[a]}) ← ${short(old)} + ${short(α)} · (${short(target)} − ${term(old)})
        = <b>${short(q[s][a])}</b>.`;
      [s, a, episodes] = isOver ? [18, choose(18, ε), episodes + 1] : [next, next_action, episodes];
    };
    const play = (...given) => {
      const until = episodes + 100;
      for (let i = 0; i < 1e5 && episodes < until; i++) step(...given);
    };
    begin();
    const names = ["Q-learning", "Sarsa", "expected Sarsa"];
    const rates = { ε: [0.05, 1, 0.1], α: [0.05, 1, 0.5], γ: [0, 1, 1] };
    const sliders = { ...rates, target: [0, 2, 0, 1, names] };
    const buttons = { "One step": step, "100 episodes": play, "Begin anew": begin };
    figure(place, "a table that learns to walk along a cliff", sliders, () => {
      const at = (i) => [110 + 80 * (i % 6), 5 + 53 * Math.floor(i / 6)];
      const cells = q.map((row, i) => {
        const [x, y] = at(i), name = isCliff(i) ? "cliff" : i === 23 ? "goal" : "";
        return rect(x, y, 77, 50, name || "cell") +
          text(x + 38, y + 22, name || greedy(i).map((k) => arrows[k]).join(""), "on") +
          text(x + 38, y + 40, name ? "" : short(Math.max(...row)));
      });
      return [cells.join("") + dot(at(s).map((x) => x + 12)), `${episodes} episodes. ${last} Arrows: the
        best actions of the table; numbers: their values.`];
    }, buttons);
  },
  es_gradient(place, calls) { // the return F has its top in the middle
    const [, first] = calls.find(([name]) => name === "make_candidates");
    const at = ([x, y]) => [350 + 100 * x, 118 - 42 * y], F = ([x, y]) => -(x ** 2) - 2 * y ** 2;
    const ranksOf = (candidates) => compute.centered_ranks({ returns: candidates.map(F) });
    const normal = () => sum(range(12).map(Math.random)) - 6; // very nearly
    let trail, noise;
    const begin = () => { [trail, noise] = [[first.theta], first.noise]; };
    const ask = (sigma) => compute.make_candidates({ theta: trail.at(-1), noise, sigma });
    const next = (sigma, α) => {
      const gradient = compute.es_gradient({ fitnesses: ranksOf(ask(sigma)), noise, sigma });
      return trail.at(-1).map((x, i) => x + α * gradient[i]);
    };
    const go = (σ, α) => { trail.push(next(σ, α)); noise = range(4).map(() => [normal(), normal()]); };
    begin();
    const sliders = { σ: [0.1, 1, first.sigma], α: [0.1, 1, 0.5] };
    figure(place, "pairs, ranks and a step", sliders, (sigma, α) => {
      const candidates = ask(sigma), places = candidates.map(at), target = next(sigma, α);
      const [cx, cy] = at([0, 0]), theta = trail.at(-1);
      const hill = (k) => `<ellipse cx="${cx}" cy="${cy}" rx="${100 * k}" ry="${30 * k}"/>`;
      const pairs = noise.map((_, k) => path(places.slice(2 * k, 2 * k + 2)));
      const steps = path([...trail, target].map(at), "thick");
      const number = (rank, i) => text(places[i][0], places[i][1] + 4, short(rank), "on");
      const parts = [...[1, 2, 3].map(hill), ...pairs, steps, ...ranksOf(candidates).map(number)];
      return [parts.join("") + dot(at(theta)), `θ = (${list(theta)}). The numbers are the centred ranks of
        the candidates θ ± σ ε: only their order counts. The step leads to (${list(target)}).`];
    }, { "Take the step": go, "Begin anew": begin });
  },
  squashed_gaussian(place, [[, { mean, log_std }]]) {
    const sliders = { mean: [-3, 3, mean[1][0]], σ: [0.1, 3, Math.exp(log_std[1][0])] };
    figure(place, "the density of a squashed Gaussian", sliders, (m, σ) => {
      const points = range(401).map((i) => {
        const given = { mean: [[m]], log_std: [[Math.log(σ)]], noise: [[(i - 200) / 50]] };
        const [[[action]], [log_density]] = compute.squashed_gaussian(given);
        return [action, Math.exp(log_density)];
      });
      const [a, density] = points[200].map(short), top = Math.max(...points.map(([, y]) => y));
      const picture = lines(`the action; highest: ${short(top)}`, { thick: points }, [-1, 0], [1, top], points[200]);
      return [picture, `In the middle of the Gaussian,
        u = ${short(m)}, the action is ${a} and its density ${density}. A wide one piles up at the bounds.`];
    });
  },
};

for (const place of document.querySelectorAll("[data-figure]")) {
  FIGURES[place.dataset.figure](place, JSON.parse(place.textContent));
}
