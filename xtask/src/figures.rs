//! The figures of the feature table: measured anew, and its cells made of them.
//!
//! `dmaspace bench all` has those of origins 1, 2, 3 and 5, `bench-tables` those of origin 4. Cells are medians. A row
//! works when its figure is beaten, as its table says; what was measured on another tree, or quickly,
//! is never said to work.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::Value;

use crate::cargo::{self, Repository};
use crate::origins;

/// The options of `cargo xtask figures`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Less memory and few rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the cells into docs/origins.md; without it they are printed.
    #[arg(long)]
    write: bool,
    /// Measure nothing: take this, which `dmaspace bench all --json` has written.
    #[arg(long, value_name = "FILE")]
    bench: Option<PathBuf>,
    /// Measure nothing: take this, which `cargo xtask bench-tables` has written (docs/performance/results.json).
    #[arg(long, value_name = "FILE")]
    tables: Option<PathBuf>,
}

/// Measures, unless files are given, and prints or writes the cells.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let (mut bench, mut tables) = (options.bench.clone(), options.tables.clone());
    if bench.is_none() && tables.is_none() {
        let place = repository.metadata.target_directory.join("figures");
        fs::create_dir_all(&place).with_context(|| format!("{place} cannot be made"))?;
        let files = [place.join("bench.json"), place.join("tables.json")];
        cargo::run(&mut measure_bench(options, repository, files[0].as_ref()))?;
        cargo::run(&mut measure_tables(options, repository, files[1].as_ref()))?;
        let [of_bench, of_tables] = files.map(|file| Some(file.into_std_path_buf()));
        (bench, tables) = (of_bench, of_tables);
    }
    let mut found = Vec::new();
    let mut sources = Vec::new();
    if let Some(file) = bench {
        let json = read(&file)?;
        let doubt = doubt(repository, text(&json["commit"]), json["quick"] == true);
        found.extend(of_bench(&json).into_iter().map(|cells| cells.with(&doubt)));
        let (commit, processor) = (text(&json["commit"]), text(&json["machine"]["processor"]));
        sources.push((BENCH, format!("{BENCH} commit {commit}, {processor}.*")));
    }
    if let Some(file) = tables {
        let json = read(&file)?;
        let quick = json["rounds"].as_u64().is_none_or(|rounds| rounds < 15);
        let origin = &json["origin"];
        let doubt = doubt(repository, text(&origin["commit"]), quick);
        found.extend(of_tables(&json).into_iter().map(|cells| cells.with(&doubt)));
        let (commit, processor) = (text(&origin["commit"]), text(&origin["processor"]));
        sources.push((TABLES, format!("{TABLES} commit {commit}, {processor}.*")));
    }
    for cells in &found {
        println!(
            "{}: {} | {} | {}",
            cells.id, cells.figure, cells.state, cells.missing
        );
    }
    if options.write {
        let file = repository.root.join(origins::FILE);
        let old = fs::read_to_string(&file)?;
        fs::write(&file, put(&old, &found, &sources)?)?;
    }
    Ok(true)
}

fn measure_bench(options: &Options, repository: &Repository, file: &Path) -> Command {
    let mut command = repository.cargo(&["run", "--release", "--package", "dmaspace-cli", "--"]);
    command.args(["bench", "all", "--json"]).arg(file);
    if options.quick {
        command.arg("--quick");
    }
    command
}

fn measure_tables(options: &Options, repository: &Repository, file: &Path) -> Command {
    let mut command = repository.cargo(&["run", "--profile", "measure", "--package"]);
    command.args([
        "dmaspace-lab",
        "--features",
        "peers",
        "--bin",
        "bench-tables",
    ]);
    command.args(["--", "--work"]);
    command.arg(repository.metadata.target_directory.join("conformance"));
    command.arg("--json").arg(file).args(["--only", "groups"]);
    for (row, _) in OPERATIONS {
        for (format, _) in FORMATS {
            command.args(["--only", &format!("{row}/{format}")]);
        }
    }
    if options.quick {
        command.arg("--quick");
    }
    command
}

fn read(file: &Path) -> anyhow::Result<Value> {
    let text = fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no JSON", file.display()))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("unknown")
}

/// Why figures that were taken at this commit are not those of the tree at hand.
fn doubt(repository: &Repository, commit: &str, quick: bool) -> Option<String> {
    let measured = [
        "crates",
        ":(exclude,glob)crates/*/tests/**",
        "lab",
        "conformance/src",
        "conformance/linux-pt",
    ];
    let same = Command::new("git")
        .args(["diff", "--quiet", commit, "--"])
        .args(measured)
        .current_dir(&repository.root)
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    match (same, quick) {
        (true, false) => None,
        (true, true) => Some("figures of a quick run".into()),
        (false, _) => Some(format!("figures of an earlier tree ({commit})")),
    }
}

/// The lines below the rules that say what was measured.
const BENCH: &str = "*Pins, maps, balloons:";
const TABLES: &str = "*Page tables:";

/// What one row is to say.
#[derive(Clone, Debug, PartialEq)]
struct Cells {
    id: String,
    figure: String,
    /// Of the library; empty where it does not hang on the figure.
    state: &'static str,
    missing: String,
}

impl Cells {
    /// It works, but for what is missing.
    fn new(id: &str, figure: String, beaten: bool, missing: &[String]) -> Self {
        Self {
            id: id.into(),
            figure,
            state: if beaten { "works" } else { "partly" },
            missing: missing.join("; "),
        }
    }

    /// Only the figure is new.
    fn figure(id: &str, figure: String) -> Self {
        let (state, missing) = ("", String::new());
        let id = id.into();
        Self {
            id,
            figure,
            state,
            missing,
        }
    }

    fn with(mut self, doubt: &Option<String>) -> Self {
        if let (Some(doubt), false) = (doubt, self.state.is_empty()) {
            self.state = "partly";
            self.missing = match self.missing.as_str() {
                "" => doubt.clone(),
                missing => format!("{doubt}; {missing}"),
            };
        }
        self
    }
}

/// The document with other cells.
fn put(old: &str, found: &[Cells], sources: &[(&str, String)]) -> anyhow::Result<String> {
    let (rows, faults) = origins::parse(old);
    ensure!(faults.is_empty(), "{}: {faults:?}", origins::FILE);
    let mut lines: Vec<String> = old.lines().map(str::to_owned).collect();
    for cells in found {
        let row = rows.iter().find(|row| row.id() == cells.id);
        let mut row = row.with_context(|| format!("no row {}", cells.id))?.clone();
        row.set("here", &cells.figure)?;
        if !cells.state.is_empty() {
            row.set("library", cells.state)?;
            row.set("what is missing", &cells.missing)?;
        }
        lines[row.line - 1] = row.text();
    }
    for (begin, source) in sources {
        let line = lines.iter_mut().find(|line| line.starts_with(begin));
        *line.with_context(|| format!("no line begins with {begin}"))? = source.clone();
    }
    Ok(lines.join("\n") + "\n")
}

/// The medians of `dmaspace bench`.
struct Bench<'a>(Vec<&'a Value>);

impl Bench<'_> {
    /// The rows of this group, op, memory, format and subject.
    fn rows(&self, what: [&str; 5]) -> impl Iterator<Item = &Value> {
        let names = ["group", "op", "memory", "format", "subject"];
        let all = self.0.iter().copied();
        all.filter(move |row| names.iter().zip(what).all(|(name, word)| row[name] == word))
    }

    fn median(&self, what: [&str; 5], threads: u64, bytes: Option<u64>) -> Option<f64> {
        let mut rows = self.rows(what).filter(|row| row["threads"] == threads);
        let row = rows.find(|row| bytes.is_none_or(|bytes| row["size_bytes"] == bytes));
        row?["median"].as_f64()
    }

    fn bytes(&self, what: [&str; 5]) -> Option<u64> {
        self.rows(what).next()?["size_bytes"].as_u64()
    }
}

/// What stays to be said of figures without a guest, and of pins.
const NO_GUEST: &str = "no guest";
const NO_DEVICE: &str = "no pin by VFIO or iommufd was timed";
const MEMORIES: [&str; 3] = ["hugetlb-2m", "thp", "4k"];

/// The rows of origins 1, 2, 3 and 5; those of which something was not run stay as they are.
fn of_bench(json: &Value) -> Vec<Cells> {
    let groups = json["groups"].as_array().into_iter().flatten();
    let rows = groups.flat_map(|group| group["rows"].as_array().into_iter().flatten());
    let bench = Bench(rows.collect());
    let mut found = Vec::new();
    found.extend(pin(&bench, "O1-03", "hugetlb-2m"));
    found.extend(pin(&bench, "O1-13", "hugetlb-1g"));
    found.extend((0..11).filter_map(|nth| map(&bench, nth)));
    found.extend(balloon(&bench).into_iter().flatten());
    let cases = ["first socket alone", "second socket alone", "both sockets"];
    for (id, case) in ["O5-04", "O5-05", "O5-06"].into_iter().zip(cases) {
        let rate = |subject| bench.median(["numa", case, "", "vtd-ss", subject], 1, None);
        let rates = rate("shared-simulated").zip(rate("per-node-simulated"));
        let figure = rates.map(|(shared, own)| format!("simulated: {shared:.1} → {own:.1}"));
        found.extend(figure.map(|figure| Cells::figure(id, figure)));
    }
    found
}

/// By folio and by page against ours.
fn pin(bench: &Bench<'_>, id: &str, memory: &str) -> Option<Cells> {
    let published = |who| bench.median(["pin", "map for DMA", memory, "", who], 1, None);
    let there = published("origin-before").zip(published("origin-after"));
    let there = there.map(|(before, after)| before / after);
    let of = |op, who| bench.median(["pin", op, memory, "vtd-ss", who], 1, None);
    let whole = |who| of("map for DMA", who);
    let (page, folio) = (whole("charge-by-page")?, whole("by-folio")?);
    let (ours, kernel) = (whole("dmaspace")?, of("pin", "dmaspace")?);
    let (by_page, by_folio) = (page / ours, folio / ours);
    let mut missing = Vec::new();
    if by_page <= there.unwrap_or(1.0) {
        let there = there.map_or_else(String::new, |there| format!(", there {there:.2}"));
        missing.push(format!("by page takes {by_page:.2} times as long{there}"));
    }
    if by_folio < 0.95 {
        missing.push(format!("by folio takes {by_folio:.2} times as long"));
    }
    let beaten = missing.is_empty();
    missing.push(NO_DEVICE.into());
    let [page, folio, ours, kernel] = [page, folio, ours, kernel].map(three);
    let bytes = bench.bytes(["pin", "map for DMA", memory, "vtd-ss", "dmaspace"]);
    let gib = bytes.unwrap_or(0) >> 30;
    let figure = format!(
        "{gib} GiB: charged by page {page} ms, by folio {folio}, all at once {ours}, of which the kernel's pin is {kernel}"
    );
    Some(Cells::new(id, figure, beaten, &missing))
}

/// The leaves of origin 2.
const PAGE: u64 = 4 << 10;
const BLOCK: u64 = 2 << 20;

/// Page by page against runs, in Arm's format.
fn map(bench: &Bench<'_>, nth: usize) -> Option<Cells> {
    let size = 4096u64 << nth;
    let kinds = [
        ("map", 1),
        ("unmap, strict", 1),
        ("map", 10),
        ("unmap, strict", 10),
    ];
    let mut here = Vec::new();
    let (mut missed, mut slower) = (Vec::new(), Vec::new());
    for (op, threads) in kinds {
        let of = |who| bench.median(["map", op, "", "arm-s1-4k", who], threads, Some(size));
        let (before, after) = (of("by-page")?, of("dmaspace")?);
        let name = format!("{} {threads}", op.trim_end_matches(", strict"));
        let there = |who| bench.median(["map", op, "", "", who], threads, Some(size));
        if before / after < there("origin-before")? / there("origin-after")? {
            missed.push(name.clone());
        }
        // For one page both are the same call. Medians of ten threads differ by a few in a hundred.
        if !matches!(size, PAGE | BLOCK) && after > 1.05 * before {
            slower.push(name);
        }
        here.push((before, after));
    }
    let pair = |map: (f64, f64), unmap: (f64, f64)| {
        format!("{:.2}/{:.2} → {:.2}/{:.2}", map.0, unmap.0, map.1, unmap.1)
    };
    let (one, ten) = (pair(here[0], here[1]), pair(here[2], here[3]));
    let said = [
        ("ratio missed", &missed),
        ("slower than page by page", &slower),
    ];
    let said = said.into_iter().filter(|(_, names)| !names.is_empty());
    let missing = said.map(|(what, names)| format!("{what}: {}", names.join(", ")));
    let figure = format!("{one}; {ten}");
    let id = format!("O2-{}", 12 + nth);
    let missing: Vec<_> = missing.collect();
    Some(Cells::new(&id, figure, missed.is_empty(), &missing))
}

/// Page by page against bulk, in three kinds of memory.
fn balloon(bench: &Bench<'_>) -> [Option<Cells>; 4] {
    let of = |op, format, who| {
        let [Some(a), Some(b), Some(c)] =
            MEMORIES.map(|memory| bench.median(["balloon", op, memory, format, who], 1, None))
        else {
            return None;
        };
        Some([a, b, c])
    };
    let before = |op| of(op, "", "by-page");
    let after = |op| of(op, "bitmap-records", "dmaspace");
    let list = |figures: [f64; 3]| figures.map(three).join(", ");
    let stage = |id, op, missing: &[String]| {
        let (before, after) = (before(op)?, after(op)?);
        let more = (0..3).filter(|nth| after[*nth] >= before[*nth]);
        let more = more.map(|nth| format!("by runs no faster in {}", MEMORIES[nth]));
        let missing: Vec<_> = missing.iter().cloned().chain(more).collect();
        let figure = format!("{} → {} ms", list(before), list(after));
        Some(Cells::new(id, figure, missing.is_empty(), &missing))
    };
    let whole = || {
        let (before, after) = (before("inflate")?, after("inflate")?);
        let less = |nth: usize| 100.0 * (1.0 - after[nth] / before[nth]);
        let cells = [0, 1, 2].map(|nth| format!("{} (−{:.1} %)", three(after[nth]), less(nth)));
        let like = format!("like for like, in 4K, −{:.0} %, there −85 %", less(2));
        let missing = [NO_GUEST.into(), like];
        let figure = format!("{} ms", cells.join(", "));
        Some(Cells::new("O3-07", figure, false, &missing))
    };
    let first = || {
        let (all, messages) = (before("inflate")?, before("messages")?);
        let figure = format!("{} messages; {} ms", messages[2], list(all));
        Some(Cells::new("O3-01", figure, false, &[NO_GUEST.into()]))
    };
    let send = "\"send\" is what their processor time leaves of the clock's";
    [
        first(),
        stage("O3-03", "send", &[NO_GUEST.into(), send.into()]),
        stage("O3-05", "discard", &[]),
        whole(),
    ]
}

/// The rows of `bench-tables`, and the formats, in the order of the table.
const OPERATIONS: [(&str, u32); 6] = [
    ("map-1", 0),
    ("map-256", 1),
    ("map-256-block", 2),
    ("unmap-1", 3),
    ("unmap-256", 4),
    ("unmap-256-block", 5),
];
const FORMATS: [(&str, u32); 4] = [
    ("amdv1", 25),
    ("x86-64", 31),
    ("vtd-ss", 37),
    ("arm-s1-4k", 43),
];

fn of_tables(json: &Value) -> Vec<Cells> {
    let mut found = Vec::new();
    for (format, first) in FORMATS {
        for (row, nth) in OPERATIONS {
            let id = format!("O4-{}", first + nth);
            found.extend(table(&json["rows"], &id, row, format));
        }
    }
    let group = |format| median(&json["groups"]["rows"], "unmap-256", format, "exclusive");
    if let Some((arm, plain)) = group("arm-s1-4k").zip(group("vtd-ss")) {
        let figure = format!("Arm {} ns, without groups {}", three(arm), three(plain));
        let why = "the reason given ([here](unmap-of-groups.md)) fits the figures, but \
                   Linux 7.2 does not have the code that was measured";
        found.push(Cells::new("O4-49", figure, false, &[why.into()]));
    }
    found
}

/// Ours against Linux's.
fn table(rows: &Value, id: &str, row: &str, format: &str) -> Option<Cells> {
    let of = |who| median(rows, row, format, who);
    let (exclusive, shared) = (of("exclusive")?, of("shared")?);
    let (plain, plain_shared) = (of("scalar")?, of("scalar-shared")?);
    let [first, second, third, fourth] = [exclusive, shared, plain, plain_shared].map(three);
    let figure = format!("{first}/{second}; {third}/{fourth}");
    let Some(linux) = of("linux") else {
        let missing = ["Linux's code was not measured".into()];
        return Some(Cells::new(id, figure, false, &missing));
    };
    let missing: &[_] = match linux {
        linux if shared < linux && plain_shared < linux => &[],
        linux if shared < linux => &["without `std` the shared form takes longer than Linux"],
        linux if exclusive < linux => &["exclusive alone: the shared form takes longer than Linux"],
        _ => &["Linux takes less"],
    };
    let missing: Vec<String> = missing.iter().copied().map(String::from).collect();
    let figure = format!("{figure}; Linux {}", three(linux));
    Some(Cells::new(id, figure, shared < linux, &missing))
}

/// The median of a subject; the lowest where there are several, as of Linux's compilers.
fn median(rows: &Value, row: &str, format: &str, who: &str) -> Option<f64> {
    let mut rows = rows.as_array()?.iter();
    let found = rows.find(|found| found["row"] == row && found["format"] == format)?;
    let entries = found["entries"].as_array()?.iter();
    let medians = entries
        .filter(|entry| entry["who"] == who)
        .filter_map(|entry| entry["figure"]["median"].as_f64());
    medians.reduce(f64::min)
}

/// With three digits that count.
fn three(value: f64) -> String {
    match value {
        0.0..0.995 => format!("{value:.2}"),
        0.995..9.995 => format!("{value:.2}"),
        9.995..99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(who: &str, median: f64) -> Value {
        json!({"who": who, "figure": {"median": median}})
    }

    #[test]
    fn a_table_works_when_the_shared_form_takes_less_than_linuxs_fastest() {
        for (shared, exclusive, state) in [(20.0, 9.0, "works"), (40.0, 9.0, "partly")] {
            let entries = [
                entry("exclusive", exclusive),
                entry("shared", shared),
                entry("scalar", 12.0),
                entry("scalar-shared", 22.0),
                entry("linux", 50.0),
                entry("linux", 30.0),
            ];
            let json = json!({"rows": [{"row": "map-1", "format": "amdv1", "entries": entries}]});
            let found = of_tables(&json);
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].id.as_str(), found[0].state), ("O4-25", state));
            assert!(found[0].figure.ends_with("Linux 30.0"), "{found:?}");
        }
    }

    #[test]
    fn maps_work_when_all_four_ratios_are_those_of_the_origin() {
        let row = |op, who, threads, median: f64| {
            let format = if who == "origin-before" || who == "origin-after" {
                ""
            } else {
                "arm-s1-4k"
            };
            json!({"group": "map", "op": op, "memory": "", "format": format, "subject": who,
                   "threads": threads, "size_bytes": 16384, "median": median})
        };
        for (last, state) in [(0.5, "works"), (0.95, "partly"), (1.5, "partly")] {
            let mut rows = Vec::new();
            for (op, threads, after) in [
                ("map", 1, 0.1),
                ("unmap, strict", 1, 0.1),
                ("map", 10, 0.1),
                ("unmap, strict", 10, last),
            ] {
                rows.push(row(op, "by-page", threads, 1.0));
                rows.push(row(op, "dmaspace", threads, after));
                rows.push(row(op, "origin-before", threads, 3.0));
                rows.push(row(op, "origin-after", threads, 2.0));
            }
            let found = of_bench(&json!({"groups": [{"rows": rows}]}));
            assert_eq!(found.len(), 1);
            assert_eq!((found[0].id.as_str(), found[0].state), ("O2-14", state));
            assert_eq!(found[0].missing.contains("slower than"), last > 1.0);
            assert_eq!(found[0].missing.contains("unmap 10"), state == "partly");
        }
    }

    #[test]
    fn what_is_in_doubt_does_not_work() {
        let cells = Cells::new("O4-25", "1".into(), true, &[]);
        assert_eq!((cells.state, cells.missing.as_str()), ("works", ""));
        assert_eq!(cells.clone().with(&None), cells);
        let doubted = cells.with(&Some("quick".into()));
        assert_eq!(
            (doubted.state, doubted.missing.as_str()),
            ("partly", "quick")
        );
    }

    /// The real document: every cell that there can be finds its row, and nothing else changes.
    #[test]
    fn cells_are_put_into_their_rows() {
        let file = Repository::find().unwrap().root.join(origins::FILE);
        let old = fs::read_to_string(file).unwrap();
        let ids = ["O1-03", "O2-22", "O3-07", "O4-48", "O4-49", "O5-06"];
        let cells = ids.map(|id| Cells::new(id, "a figure".into(), true, &[]));
        let sources = [
            (BENCH, format!("{BENCH} now.*")),
            (TABLES, format!("{TABLES} now.*")),
        ];
        let new = put(&old, &cells, &sources).unwrap();
        let differ = old.lines().zip(new.lines()).filter(|(old, new)| old != new);
        let differ: Vec<_> = differ.map(|(_, new)| new).collect();
        assert_eq!(differ.len(), ids.len() + 2);
        for (line, id) in differ.iter().skip(2).zip(ids) {
            assert!(line.starts_with(&format!("| {id} |")) && line.contains("| a figure |"));
        }
        assert_eq!(origins::parse(&new).1, [""; 0]);
        let absent = Cells::new("O9-01", "1".into(), true, &[]);
        assert!(put(&old, &[absent], &[]).is_err());
    }
}
