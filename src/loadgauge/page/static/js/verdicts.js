/** The four verdicts: of each the key of its word (`fit.KEY`) and its colour (`tokens.css`). */
const VERDICTS = { fits: ["yes", "good"], tight: ["tight", "warn"], depends: ["depends", "depends"], "does not fit": ["no", "bad"] };

/** Without a GPU there is none. */
export const verdictOf = ({ verdict }) => VERDICTS[verdict] ?? ["unknown", ""];
