//! The feature table `docs/origins.md`: the shape of its rows, and that what they name is in the tree.
//!
//! Names are looked up by searching the text of the files, not by parsing it. A name that is only similar, an item
//! that is not public, or a test that is compiled out is therefore not noticed here; that tests run is what
//! the part `tests` is for.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use crate::{cargo::Repository, parts::Outcome, parts::PARTS};

pub(crate) const FILE: &str = "docs/origins.md";

/// The columns.
const HEADER: [&str; 11] = [
    "id",
    "the origin says",
    "library",
    "kernel",
    "simulated",
    "hardware",
    "what is missing",
    "figure there",
    "figure here",
    "our type or function",
    "shown by",
];

/// What a cell of the four columns of states may say.
const STATES: [&str; 4] = ["works", "partly", "not yet", NONE];
const NONE: &str = "–";

/// One row.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    /// Where it stands in the file, from 1.
    pub(crate) line: usize,
    /// Its cells, as many as [`HEADER`] has.
    pub(crate) cells: Vec<String>,
}

impl Row {
    fn id(&self) -> &str {
        &self.cells[0]
    }

    fn states(&self) -> &[String] {
        &self.cells[2..6]
    }
}

/// The part `origins` of the test command.
pub(crate) fn part(repository: &Repository) -> anyhow::Result<Outcome> {
    let text = fs::read_to_string(repository.root.join(FILE))
        .with_context(|| format!("{FILE} cannot be read"))?;
    let tree = Tree::read(&repository.root);
    let (rows, mut faults) = parse(&text);
    for row in &rows {
        let found = faults_of(row, &tree);
        faults.extend(found.map(|fault| format!("line {}: {}: {fault}", row.line, row.id())));
    }
    if !faults.is_empty() {
        let (count, faults) = (faults.len(), faults.join("\n  "));
        bail!("{FILE} (faults: {count})\n  {faults}");
    }
    for (at, column) in HEADER.iter().enumerate().skip(2).take(4) {
        let count = |state| rows.iter().filter(|row| row.cells[at] == state).count();
        let counts = STATES.map(|state| format!("{state} {}", count(state)));
        println!("{column}: {}", counts.join(", "));
    }
    Ok(Outcome::Passed)
}

/// Reads all rows; what is wrong with the shape comes back as sentences. Ids run `O1-01`, `O1-02`, … without
/// a gap, so that a row cannot vanish unseen.
pub(crate) fn parse(text: &str) -> (Vec<Row>, Vec<String>) {
    let (mut rows, mut faults) = (Vec::<Row>::new(), Vec::new());
    for (line, text) in (1..).zip(text.lines()) {
        let Some(inner) = text
            .strip_prefix("| O")
            .and_then(|_| text.strip_suffix('|'))
        else {
            continue;
        };
        let cells: Vec<_> = inner[1..].split('|').map(|c| c.trim().to_owned()).collect();
        let last = rows.last().map_or("O0-00", Row::id);
        let [id, ..] = cells.as_slice() else { continue };
        if cells.len() != HEADER.len() || cells.iter().any(String::is_empty) {
            let (found, wanted) = (cells.len(), HEADER.len());
            faults.push(format!(
                "line {line}: {id}: {found} cells, of which none may be empty, instead of {wanted}"
            ));
        }
        let (before, number) = last.split_at(3);
        let number = number.parse().unwrap_or(0) + 1;
        let origin = before[1..2].parse().unwrap_or(0) + 1;
        let next = [format!("{before}{number:02}"), format!("O{origin}-01")];
        if !next.contains(id) {
            faults.push(format!("line {line}: {id} follows {last}"));
        }
        if cells.len() == HEADER.len() {
            rows.push(Row { line, cells });
        }
    }
    if rows.last().is_none_or(|row| !row.id().starts_with("O5-")) {
        faults.push("there are not five origins".into());
    }
    (rows, faults)
}

/// What a row claims and the tree does not have, a sentence each.
fn faults_of(row: &Row, tree: &Tree) -> impl Iterator<Item = String> {
    let mut faults = Vec::new();
    let has = |state| row.states().iter().any(|cell| cell == state);
    for state in row.states() {
        if !STATES.contains(&state.as_str()) {
            faults.push(format!("the state `{state}` is none of {STATES:?}"));
        }
    }
    let (items, tests) = (names(&row.cells[9]), names(&row.cells[10]));
    if has("partly") && row.cells[6] == NONE {
        faults.push("is partly there, and does not say what is missing".into());
    }
    if (has("works") || has("partly")) && tests.is_empty() {
        faults.push("names nothing that shows it".into());
    }
    let items = items.into_iter().filter(|item| !tree.has_item(item));
    faults.extend(items.map(|item| format!("there is no item `{item}`")));
    let tests = tests.into_iter().filter_map(|test| tree.test(test).err());
    faults.extend(tests);
    faults.into_iter()
}

/// What stands in backticks.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// The sources of all crates.
struct Tree(Vec<(PathBuf, String)>);

impl Tree {
    fn read(root: &Path) -> Self {
        let mut files = Vec::new();
        let mut places = ["crates", "conformance", "lab", "xtask"].map(|place| root.join(place));
        let mut open: Vec<PathBuf> = places.iter_mut().map(std::mem::take).collect();
        while let Some(place) = open.pop() {
            if place.is_dir() {
                let inside = fs::read_dir(&place).into_iter().flatten().flatten();
                open.extend(inside.map(|entry| entry.path()));
            } else if place.extension().is_some_and(|end| end == "rs")
                && let Ok(text) = fs::read_to_string(&place)
            {
                let place = place.strip_prefix(root).unwrap_or(&place);
                let place = place.strip_prefix("crates").unwrap_or(place);
                files.push((place.to_owned(), text));
            }
        }
        Self(files)
    }

    /// The files below a directory of a crate, which may be written as it is in paths of Rust.
    fn below(&self, krate: &str, inside: &str) -> impl Iterator<Item = &(PathBuf, String)> {
        let place = Path::new(&krate.replace('_', "-")).join(inside);
        let files = self.0.iter();
        files.filter(move |(path, _)| path.starts_with(&place))
    }

    /// `iopt::Table::map`: each word behind the crate is one of its library's sources.
    fn has_item(&self, name: &str) -> bool {
        let mut words = name.split("::");
        let krate = words.next().unwrap_or_default();
        let mut words = words.peekable();
        let known = |word| {
            self.below(krate, "src")
                .any(|(_, text)| has_word(text, word))
        };
        words.peek().is_some() && words.all(known)
    }

    /// A test, bench, row of `cargo xtask bench-tables` or part of the test command.
    fn test(&self, name: &str) -> Result<(), String> {
        let found = if let Some(part) = name.strip_prefix("part:") {
            PARTS.iter().any(|known| known.name == part)
        } else if let Some(row) = name.strip_prefix("row:") {
            row.split('/').all(|word| {
                let word = format!("\"{word}\"");
                self.below("lab", "src/peers")
                    .any(|(_, text)| text.contains(&word))
            })
        } else if let Some(("bench", bench)) = name.split_once(':') {
            let (krate, bench) = bench.split_once('/').unwrap_or_default();
            let inside = format!("benches/{bench}.rs");
            self.below(krate, &inside).next().is_some()
        } else {
            return self.function(name);
        };
        found
            .then_some(())
            .ok_or_else(|| format!("there is no `{name}`"))
    }

    /// `iopt/tests/model/exclusive.rs::amdv1::name`, in that file or by a macro of one beside it; or
    /// `runs::join::tests::name`, in the library.
    fn function(&self, name: &str) -> Result<(), String> {
        let (krate, file, path) = match name.split_once(".rs::") {
            Some((file, path)) => {
                let (krate, file) = file.split_once('/').unwrap_or_default();
                (krate, format!("{file}.rs"), path)
            }
            None => {
                let (krate, path) = name.split_once("::").unwrap_or_default();
                (krate, "src".into(), path)
            }
        };
        let mut words = path.rsplit("::");
        let function = words.next().unwrap_or_default();
        let nowhere = || format!("there is no test `{name}`");
        let beside = match Path::new(&file).parent() {
            Some(directory) if file != "src" => directory.to_string_lossy().into_owned(),
            _ => file.clone(),
        };
        // Modules are words of the file, or of its path.
        let named = |word: &str| {
            self.below(krate, &file)
                .any(|(path, text)| has_word(text, word) || has_word(&path.to_string_lossy(), word))
        };
        if self.below(krate, &file).next().is_none() || !words.all(named) {
            return Err(nowhere());
        }
        let heads = self
            .below(krate, &beside)
            .filter_map(|(_, text)| attributes(text, function));
        let mut heads = heads.peekable();
        heads.peek().ok_or_else(nowhere)?;
        match heads.find(|head| head.contains("#[test]") && !head.contains("#[ignore")) {
            Some(_) => Ok(()),
            None => Err(format!("`{name}` is ignored, or no test")),
        }
    }
}

/// The attributes and comments right above `fn name(`, if there is such a line.
fn attributes(text: &str, name: &str) -> Option<String> {
    let head = format!("fn {name}(");
    let lines: Vec<_> = text.lines().map(str::trim).collect();
    let at = lines.iter().position(|line| line.starts_with(&head))?;
    let above = lines[..at].iter().rev();
    let above = above.take_while(|line| line.starts_with("#[") || line.starts_with("//"));
    Some(above.copied().collect())
}

fn has_word(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(part) && !after.starts_with(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: &str = "xtask::origins::tests::what_a_row_names_must_be_there";

    /// A row of this id with these items, tests, state of the library, and what is missing.
    fn row(id: &str, item: &str, test: &str, state: &str, missing: &str) -> String {
        format!("| {id} | a | {state} | not yet | – | – | {missing} | – | – | {item} | {test} |\n")
    }

    fn tree() -> Tree {
        Tree::read(&Repository::find().unwrap().root)
    }

    #[test]
    fn a_row_of_the_wrong_shape_fails() {
        let good = |id: &str| row(id, "–", "–", "not yet", "–");
        let first = (1..=5).map(|origin| good(&format!("O{origin}-01")));
        let first = first.collect::<String>();
        assert_eq!(parse(&first).1, [""; 0]);
        let more = first + &good("O5-02");
        assert_eq!(parse(&more).0.len(), 6);
        for (bad, fault) in [
            (
                more.replace("O5-02", "O5-03"),
                "line 6: O5-03 follows O5-01",
            ),
            (
                more.replace("O5-02", "O5-01"),
                "line 6: O5-01 follows O5-01",
            ),
            (
                more.replace("O3-01", "O4-01"),
                "line 3: O4-01 follows O2-01",
            ),
            (more.replace("O5-0", "O4-0"), "there are not five origins"),
            (
                more.replace("O1-01 | a", "O1-01"),
                "line 1: O1-01: 10 cells",
            ),
            (
                more.replace("O1-01 | a", "O1-01 | "),
                "line 1: O1-01: 11 cells",
            ),
        ] {
            let faults = parse(&bad).1;
            assert!(faults.iter().any(|it| it.starts_with(fault)), "{faults:?}");
        }
    }

    #[test]
    fn what_a_row_names_must_be_there() {
        let tree = tree();
        let faults = |text: &str| {
            let row = parse(text).0.remove(0);
            faults_of(&row, &tree).collect::<Vec<_>>()
        };
        let of = |item: &str, test: &str, state: &str, missing: &str| {
            faults(&row("O1-01", item, test, state, missing))
        };
        let test = format!("`{TEST}`, `part:origins`, `row:map-1/amdv1`, `bench:ioas/pin`");
        assert_eq!(of("`runs::PageSizes::step`", &test, "works", "–"), [""; 0]);
        for (item, test, state, missing) in [
            ("`runs::Absent`", &*test, "works", "–"),
            ("`runs`", &*test, "works", "–"),
            ("–", "–", "works", "–"),
            ("–", &*test, "done", "–"),
            ("–", &*test, "partly", "–"),
            ("–", "`xtask::origins::tests::absent`", "works", "–"),
            (
                "–",
                "`runs::absent::tests::a_step_works_at_the_ends_of_the_address_space`",
                "works",
                "–",
            ),
            ("–", "`xtask::origins::faults_of`", "works", "–"),
            ("–", "`iopt/tests/absent.rs::x`", "works", "–"),
            ("–", "`part:absent`", "works", "–"),
            ("–", "`row:map-1/absent`", "works", "–"),
            ("–", "`bench:iopt/absent`", "works", "–"),
        ] {
            let found = of(item, test, state, missing);
            assert_eq!(found.len(), 1, "{item} {test} {state}: {found:?}");
        }
    }

    #[test]
    fn a_test_that_is_ignored_shows_nothing() {
        let text = "#[test]\n#[ignore = \"slow\"]\nfn slow() {}\n\n#[test]\nfn fast() {}";
        let head = |name| attributes(text, name);
        assert!(head("slow").unwrap().contains("#[ignore"));
        assert_eq!(head("fast").unwrap(), "#[test]");
        assert_eq!(head("absent"), None);
    }
}
