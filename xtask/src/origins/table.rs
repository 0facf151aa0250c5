//! The shape of `docs/origins.md`.
//!
//! Under each heading `## Origin N` stands one table with the columns of [`HEADER`]. Ids run
//! `ON-01`, `ON-02`, … without a gap, so that a row cannot vanish unseen.

/// The columns.
const HEADER: [&str; 7] = [
    "id",
    "the origin says",
    "our type or function",
    "test that shows it",
    "figure there",
    "figure here",
    "state",
];

/// How many origins there are; each has at least one row.
const ORIGINS: usize = 5;

/// How far a row is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Done, and its figure beaten where it has one.
    Works,
    /// Some of it is there.
    Partly,
    /// None of it is.
    NotYet,
}

impl State {
    /// As it stands in the table.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Partly => "partly",
            Self::NotYet => "not yet",
        }
    }

    /// Reads the last cell. "partly" and "not yet" may be followed by a colon and a reason.
    fn parse(cell: &str) -> Option<Self> {
        let (name, reason) = match cell.split_once(':') {
            Some((name, reason)) => (name.trim_end(), Some(reason.trim())),
            None => (cell, None),
        };
        let state = [Self::Works, Self::Partly, Self::NotYet]
            .into_iter()
            .find(|state| state.name() == name)?;
        match reason {
            Some("") => None,
            Some(_) if state == Self::Works => None,
            _ => Some(state),
        }
    }
}

/// One row.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// Where it stands in the file, from 1.
    pub(crate) line: usize,
    /// `O1-03`.
    pub(crate) id: String,
    /// The names in backticks in the third column.
    pub(crate) items: Vec<String>,
    /// The names in backticks in the fourth column.
    pub(crate) tests: Vec<String>,
    /// How far it is.
    pub(crate) state: State,
}

/// Reads all rows; what is wrong with the shape comes back as sentences.
pub(crate) fn parse(text: &str) -> (Vec<Row>, Vec<String>) {
    let mut rows = Vec::new();
    let mut faults = Vec::new();
    let mut origin = 0;
    let mut last_of = [0; ORIGINS + 1];
    // Lines of the current table so far: 0 is the header, 1 the rule below it.
    let mut in_table = 0;
    let mut in_code = false;
    for (index, text) in text.lines().enumerate() {
        let line = index + 1;
        let text = text.trim();
        if text.starts_with("```") {
            in_code = !in_code;
        }
        if in_code || !text.starts_with('|') {
            in_table = 0;
            if let Some(heading) = text.strip_prefix("## ").filter(|_| !in_code) {
                origin = origin_of(heading);
            }
            continue;
        }
        in_table += 1;
        let cells = cells(text);
        let fault = match in_table {
            1 if cells != HEADER => Some(format!("a table begins without the columns {HEADER:?}")),
            1 => None,
            2 if !cells.iter().all(|cell| is_rule(cell)) || cells.len() != HEADER.len() => {
                Some("the line under the columns is not a rule of as many cells".into())
            }
            2 => None,
            _ => {
                let expected = last_of[origin] + 1;
                // After a wrong number it goes on from there: one fault, not one for each row.
                last_of[origin] = number_of(&cells).map_or(expected, |number| number.max(expected));
                match row(line, &cells, origin, expected) {
                    Ok(row) => {
                        rows.push(row);
                        None
                    }
                    Err(fault) => Some(fault),
                }
            }
        };
        faults.extend(fault.map(|fault| format!("line {line}: {fault}")));
    }
    if in_code {
        faults.push("a code block is not closed: rows in it are not read".into());
    }
    for (origin, last) in last_of.iter().enumerate().skip(1) {
        if *last == 0 {
            faults.push(format!("origin {origin} has no row"));
        }
    }
    (rows, faults)
}

/// The number in `Origin 3: the balloon`, 0 for another heading.
fn origin_of(heading: &str) -> usize {
    heading
        .strip_prefix("Origin ")
        .map(|rest| {
            rest.chars()
                .take_while(char::is_ascii_digit)
                .collect::<String>()
        })
        .and_then(|number| number.parse().ok())
        .filter(|origin| *origin <= ORIGINS)
        .unwrap_or(0)
}

/// The 3 in the id `O1-03`.
fn number_of(cells: &[String]) -> Option<usize> {
    cells.first()?.rsplit_once('-')?.1.parse().ok()
}

fn row(line: usize, cells: &[String], origin: usize, number: usize) -> Result<Row, String> {
    let [id, says, items, tests, there, here, state] = cells else {
        let id = cells.first().map_or("", String::as_str);
        let want = HEADER.len();
        return Err(format!("{id}: has {} cells instead of {want}", cells.len()));
    };
    if origin == 0 {
        return Err(format!("{id}: stands under no heading `## Origin N`"));
    }
    // The number also rules out a second row with the same id.
    let expected = format!("O{origin}-{number:02}");
    if *id != expected {
        return Err(format!("the id is `{id}`, and `{expected}` is the next"));
    }
    for (cell, column) in [says, items, tests, there, here, state]
        .iter()
        .zip(&HEADER[1..])
    {
        if cell.is_empty() {
            return Err(format!(
                "{id}: the cell \"{column}\" is empty; a dash says nothing is meant"
            ));
        }
    }
    let Some(state) = State::parse(state) else {
        return Err(format!(
            "{id}: the state `{state}` is none of works, partly, not yet \
             (the last two may go on with `: reason`)"
        ));
    };
    let items = names(items).map_err(|fault| format!("{id}: {fault}"))?;
    let tests = names(tests).map_err(|fault| format!("{id}: {fault}"))?;
    Ok(Row {
        line,
        id: id.clone(),
        items,
        tests,
        state,
    })
}

/// The cells of a line; `\|` is a bar inside a cell.
fn cells(line: &str) -> Vec<String> {
    let line = line.strip_prefix('|').unwrap_or(line);
    let line = line.strip_suffix('|').unwrap_or(line);
    let mut cells = vec![String::new()];
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.peek() == Some(&'|') => {
                chars.next();
                push(&mut cells, '|');
            }
            '|' => cells.push(String::new()),
            c => push(&mut cells, c),
        }
    }
    cells.iter().map(|cell| cell.trim().to_owned()).collect()
}

fn push(cells: &mut [String], c: char) {
    if let Some(cell) = cells.last_mut() {
        cell.push(c);
    }
}

fn is_rule(cell: &str) -> bool {
    cell.contains("---") && cell.chars().all(|c| c == '-' || c == ':')
}

/// What stands in backticks. Outside of them only a dash, commas and spaces may stand, so that
/// a forgotten backtick does not hide a name.
fn names(cell: &str) -> Result<Vec<String>, String> {
    let pieces: Vec<_> = cell.split('`').collect();
    if pieces.len() % 2 == 0 {
        return Err(format!("a backtick is missing in {cell}"));
    }
    let outside = pieces.iter().step_by(2);
    if outside
        .flat_map(|piece| piece.chars())
        .any(|c| !matches!(c, ' ' | ',' | '–'))
    {
        return Err(format!(
            "names stand in backticks, with commas between, not so: {cell}"
        ));
    }
    Ok(pieces
        .iter()
        .skip(1)
        .step_by(2)
        .map(|name| (*name).to_owned())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "| id | the origin says | our type or function | test that shows it | figure there | figure here | state |\n|---|---|---|---|---|---|---|\n";

    /// A whole table with `rows` under origin 1, and a good row for each of the others.
    fn faults(rows: &str) -> Vec<String> {
        let mut text = format!("## Origin 1: x\n\n{HEAD}{rows}\n");
        for origin in 2..=ORIGINS {
            text += &format!(
                "\n## Origin {origin}\n\n{HEAD}| O{origin}-01 | a | – | – | – | – | not yet |\n"
            );
        }
        parse(&text).1
    }

    #[test]
    fn good_rows_are_read() {
        let text = "| O1-01 | a \\| b | `x::Y`, `x::Z` | – | 5 | – | works |\n\
                    | O1-02 | c | – | `x::t` | – | – | partly: one format |";
        assert_eq!(faults(text), Vec::<String>::new());
        let (rows, _) = parse(&format!("## Origin 1\n{HEAD}{text}"));
        assert_eq!(rows[0].items, ["x::Y", "x::Z"]);
        assert_eq!(
            (rows[0].state, rows[1].state),
            (State::Works, State::Partly)
        );
        assert_eq!(rows[1].tests, ["x::t"]);
        assert_eq!(rows[1].line, 5);
    }

    #[test]
    fn a_row_of_the_wrong_shape_fails() {
        let found = faults("| O1-01 | a | – | – | – | not yet |");
        assert_eq!(found, ["line 5: O1-01: has 6 cells instead of 7"]);
        assert_eq!(
            faults("| O1-01 | a | – | – | – |  | not yet |").len(),
            1,
            "an empty cell"
        );
        assert_eq!(
            faults("| O1-01 | a | x::Y | – | – | – | not yet |").len(),
            1,
            "no backticks"
        );
        assert_eq!(
            faults("| O1-01 | a | `x::Y | – | – | – | not yet |").len(),
            1
        );
    }

    #[test]
    fn an_unknown_state_fails() {
        for state in ["done", "Works", "works: mostly", "partly:", ""] {
            let found = faults(&format!("| O1-01 | a | – | – | – | – | {state} |"));
            assert_eq!(found.len(), 1, "{state}: {found:?}");
        }
    }

    #[test]
    fn a_second_row_with_the_same_id_fails_and_so_does_a_gap() {
        let row = |id| format!("| {id} | a | – | – | – | – | not yet |\n");
        let twice = faults(&(row("O1-01") + &row("O1-01")));
        assert_eq!(
            twice,
            ["line 6: the id is `O1-01`, and `O1-02` is the next"]
        );
        assert_eq!(faults(&(row("O1-01") + &row("O1-03"))).len(), 1);
        assert_eq!(faults(&row("O2-01")).len(), 1, "another origin's id");
    }

    #[test]
    fn a_table_without_its_columns_fails() {
        let found = parse("## Origin 1\n\n| ID | x |\n|---|---|\n| O1-01 | a |\n").1;
        assert!(
            found[0].starts_with("line 3: a table begins without"),
            "{found:?}"
        );
        let found = parse(&format!(
            "# Head\n\n{HEAD}| O1-01 | a | – | – | – | – | works |\n"
        ))
        .1;
        assert!(found[0].contains("under no heading"), "{found:?}");
    }

    #[test]
    fn an_origin_without_rows_fails() {
        assert_eq!(faults(""), ["origin 1 has no row"]);
        let hidden = faults("```\n| O1-01 | a | – | – | – | – | not yet |");
        assert!(
            hidden.iter().any(|fault| fault.contains("not closed")),
            "{hidden:?}"
        );
    }
}
