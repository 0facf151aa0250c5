//! `docs/balloon-bulk.md` beside the code: its tests exist, and its table is what the formats yield.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::patterns::{GUEST, patterns};
use crate::common::{ALL, Any};
use virtio_balloon::{GuestPage, Source};

fn crate_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn document() -> String {
    fs::read_to_string(crate_root().join("../../docs/balloon-bulk.md")).unwrap()
}

/// The file of a test: `wire::formats::name` lies in `tests/`, `collect::tests::name` in `src/`, with
/// what it tests or beside it.
fn file_of(test: &str) -> (PathBuf, &str) {
    let (module, name) = test.rsplit_once("::").unwrap();
    let path = module.replace("::", "/");
    let Some(tested) = path.strip_suffix("/tests") else {
        return (crate_root().join(format!("tests/{path}.rs")), name);
    };
    let beside = crate_root().join(format!("src/{path}.rs"));
    match beside.exists() {
        true => (beside, name),
        false => (crate_root().join(format!("src/{tested}.rs")), name),
    }
}

/// What stands between the first pair of backticks behind `mark`.
fn named(line: &str, mark: &str) -> Option<String> {
    let (_, rest) = line.rsplit_once(mark)?;
    Some(rest.split('`').nth(1)?.to_owned())
}

#[test]
fn every_must_line_has_its_test() {
    let document = document();
    // A requirement is an item of a list, over one line or several.
    let items = document
        .split("\n* ")
        .skip(1)
        .map(|item| item.split("\n\n").next().unwrap());
    let mut found = 0;
    let mut not_yet = 0;
    for item in items {
        assert!(
            item.contains("MUST") || item.contains("SHOULD") || item.contains("MAY"),
            "no requirement: {item}"
        );
        let test = named(item, "(").unwrap_or_else(|| panic!("it names no test: {item}"));
        if test == "not yet" {
            not_yet += 1;
            continue;
        }
        let (file, name) = file_of(&test);
        let source =
            fs::read_to_string(&file).unwrap_or_else(|_| panic!("there is no {}", file.display()));
        assert!(
            source.contains(&format!("fn {name}(")),
            "there is no test {test}"
        );
        found += 1;
    }
    assert!(
        found > 20 && not_yet < found,
        "{found} requirements with a test, {not_yet} without"
    );
    // Outside of such items nothing is required.
    let prose: String = document
        .split("\n\n")
        .filter(|part| !part.starts_with("* "))
        .collect();
    assert!(
        !prose.contains(" MUST ") && !prose.contains(" SHOULD "),
        "a requirement outside of a list"
    );
}

/// Bytes and messages of these pages in this format.
fn cost(format: Any, words: &[u64]) -> (usize, usize) {
    let page = GuestPage::SIZE_4K;
    let mut message = vec![0; format.usual()];
    let mut source = Source::new(page.stretches(0, words), page);
    let (mut bytes, mut messages) = (0, 0);
    loop {
        let used = format.encode(&mut source, &mut message).unwrap();
        if used == 0 {
            return (bytes, messages);
        }
        bytes += used;
        messages += 1;
    }
}

fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (nr, digit) in digits.chars().enumerate() {
        if nr > 0 && (digits.len() - nr) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The table as the document has it.
fn table() -> String {
    let mut out = String::from("| pages | le32 page numbers | bitmap records |\n|---|---|---|\n");
    for (name, words) in patterns(GUEST) {
        out += &format!("| {name} |");
        for format in ALL {
            let (bytes, messages) = cost(format, &words);
            out += &format!(" {}/{} |", thousands(bytes), thousands(messages));
        }
        out.push('\n');
    }
    out
}

#[test]
fn the_table_is_what_the_formats_yield() {
    let table = table();
    assert!(
        document().contains(&table),
        "docs/balloon-bulk.md has another table than this:\n{table}"
    );
}

#[test]
fn bitmap_records_never_take_more_than_two_bits_a_page() {
    let most = GUEST as usize / 64 * 16;
    for (name, words) in patterns(GUEST) {
        let (bytes, messages) = cost(Any::Bitmap, &words);
        assert!(
            bytes <= most + 8 * messages && messages <= 17,
            "{name}: {bytes} bytes, {messages} messages"
        );
    }
}

/// Formats that name each run, by order or length, take eight bytes a run at least.
#[test]
fn scattered_pages_take_far_less_than_their_runs() {
    for (name, words) in patterns(GUEST) {
        let runs = 8 * GuestPage::SIZE_4K.stretches(0, &words).count();
        let (bytes, _) = cost(Any::Bitmap, &words);
        let less = match name {
            "every second page" => 15 * bytes < runs,
            "random half" => 7 * bytes < runs,
            // No worse by more than a few words at the ends of runs.
            _ => bytes < runs + 256,
        };
        assert!(less, "{name}: {bytes} bytes, by runs {runs}");
    }
}
