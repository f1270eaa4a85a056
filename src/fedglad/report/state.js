// The data, what the user chose of them, and the verdicts on rounds.
(() => {
  "use strict";
  const report = window.fedgladReport;
  const { $, number, percent } = report;

  const NO_ROUND = "No round is recorded yet.";
  const FLAGS = {
    "one-sided": {
      symbol: "path://M0,0 L10,0 L5,9 Z",
      words: "The updates agreed more than usual: this round’s clients may all be alike, and the model may have been "
        + "pulled towards what they hold.",
    },
    outlier: {
      symbol: "diamond",
      words: "The updates disagreed more than usual: some clients may be unlike the others, by their data or by a "
        + "fault. Often they are only better mixed than usual, which does no harm.",
    },
  };
  const DOUBTS = { // what is said of a client, and what it means
    drifting: "It agrees less with the others, and has more loss, than clients here usually do.",
    opposed: "It points where others do not.",
    boosted: "It sends far more than the round’s other clients.",
    copied: "It sends exactly what another client of the round sends.",
  };
  const payload = JSON.parse($("data").textContent); // replaced when a live page hears news

  /** A score of a run, or of all runs, as it is shown: shares are percentages already. */
  const scored = ({ share }) => (share ? percent : number);
  const titled = ({ title, share }) => (share ? `${title}, %` : title);
  const common = () => report.payload.score;
  const METRICS = { // a name, the column, how a number is shown, whether it is a score
    score: [payload.score.title, (of) => of.scores, (value) => scored(common())(value), true],
    // These are offered if a run has them.
    averaged: [`Averaged ${payload.score.words}`, (of) => of.averaged, (value) => scored(common())(value), true],
    validation: [`Validation ${payload.score.words}`, (of) => of.validation, (value) => scored(common())(value), true],
    test_loss: ["Test loss", (of) => of.test_loss, number],
    train_loss: ["Training loss", (of) => of.train_loss, number],
    gsi: ["GSI", (of) => of.gsi, number],
    factor: ["Mean factor", (of) => of.factor?.mean, number],
  };
  const HEATS = {
    scale: ["Factor s", "The factor by which each group’s step was made shorter (below 1) or longer (above 1)."],
    ratio: ["GSI/B", "Each group’s GSI divided by its running mean B: below 1 the updates agree more than they did."],
  };

  const state = {
    run: 0, round: null, followed: true, heat: "scale", filter: "", metric: "score",
    hidden: new Set(), sort: { by: null, down: false }, everybody: false, // the worst clients first, and few
  };

  const run = () => report.payload.runs[state.run];
  const place = () => run().rounds.indexOf(state.round);
  const flagged = (of, i) => Object.hasOwn(FLAGS, of.alarm[i]);
  const distrusted = (of) => of.rounds.map((_, i) => i).filter((i) => flagged(of, i));

  /** A client's flags, of the number that stands for them in a cohort. */
  const flagsOf = (mask) => report.payload.flags.filter((_, bit) => mask & (1 << bit));

  function kind(of, i) {
    if (of.status[i] === "skipped") return "skipped";
    if (flagged(of, i)) return of.alarm[i];
    return of.gsi[i] === null || of.usual[i] === null ? "not judged" : "usual";
  }

  /** What to look at first: the distrusted round that is furthest from usual; of a live run, the last. */
  function opening() {
    if (!run()?.rounds.length) return null;
    const { rounds, gsi, usual } = run();
    const far = (i) => Math.abs(Math.log(gsi[i] / usual[i])) || 0;
    const bad = report.payload.live ? [] : distrusted(run()).sort((a, b) => far(b) - far(a));
    return rounds[bad[0] ?? rounds.length - 1];
  }

  Object.assign(report, {
    payload, scored, scoreTitle: titled, NO_ROUND, FLAGS, DOUBTS, METRICS, HEATS, state, run, place, flagged, kind, distrusted, opening, flagsOf,
  });
})();
