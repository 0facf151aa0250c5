//! Reports of real runs to the letter, with figures that differ from run to run masked: `#`.
//!
//! Reports of given values are beside what writes them (`src/report`), those of given files in `tables.rs` and
//! `numa.rs`.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod common;

use common::{dmaspace, run};

/// Numbers as `#`, spaces as one; lines of a histogram, of which there are as many as there are sizes, are left
/// out, and so is what depends on the machine behind a name in `any`.
fn masked(text: &str, any: &[&str]) -> String {
    let mut out = String::new();
    let mut skipping = false;
    for line in text.lines() {
        let continues = line.starts_with("              ");
        if continues && (skipping || line.contains(" × ")) {
            continue;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        skipping = words.first().is_some_and(|word| any.contains(word));
        let indent = if line.starts_with(' ') { "  " } else { "" };
        let line = match words.first() {
            Some(first) if skipping => format!("{indent}{first} …"),
            _ => format!("{indent}{}", digits(&words.join(" "))),
        };
        out.push_str(&line);
        out.push('\n');
    }
    out
}

/// Each number, with its commas and point, as one `#`; a number in a word (`vtd-ss`, `4k`) stays.
fn digits(line: &str) -> String {
    let number = |word: &str| {
        let core = word.trim_matches(|c: char| ",;:()%".contains(c));
        !core.is_empty() && core.chars().all(|c| c.is_ascii_digit() || ",.".contains(c))
    };
    let words = line.split(' ').map(|word| {
        if !number(word) {
            return word.to_string();
        }
        let start = word.find(|c: char| c.is_ascii_digit()).unwrap_or(0);
        let end = word
            .rfind(|c: char| c.is_ascii_digit())
            .map_or(word.len(), |at| at + 1);
        format!("{}#{}", &word[..start], &word[end..])
    });
    words.collect::<Vec<_>>().join(" ")
}

fn shown(arguments: &[&str]) -> String {
    let (stdout, stderr, status) = run(dmaspace(arguments));
    assert_eq!((stderr.as_str(), status), ("", Some(0)), "{stdout}");
    stdout
}

#[test]
fn figures_are_masked_and_words_stay() {
    let text = "times\n  map          27.9 µs     8,970 GiB/s   by runs, 16.1 times that\n  \
                format      vtd-ss, 4 levels\n  runs        128, 100 % of the memory\n              \
                2 MiB  × 128   256 MiB  ████\n  pin         io_uring, 8 buffers\n              in 2 calls\n";
    let expected = "times\n  map # µs # GiB/s by runs, # times that\n  format vtd-ss, # levels\n  \
                    runs #, # % of the memory\n  pin …\n";
    assert_eq!(masked(text, &["pin"]), expected);
}

#[test]
fn a_map_of_small_pages() {
    let options = "map --size 4M --backing 4k --devices 1 --format amdv1 --max-leaf 4k";
    let options: Vec<_> = options.split(' ').collect();
    let text = shown(&options);
    // Pages of times change their unit with the machine's load.
    let (head, times) = text.split_once("times\n").unwrap();
    let found = masked(head, &["runs", "addresses", "locked", "pin"]);
    assert_eq!(found, MAP.trim_start_matches('\n'), "{text}");
    let [times, again, check] = times.splitn(3, "\n\n").collect::<Vec<_>>()[..] else {
        panic!("not three sections: {text}");
    };
    let names = |section: &str| -> Vec<String> {
        let names = section.lines().filter_map(|line| line.get(2..14));
        names.map(|name| name.trim().to_owned()).collect()
    };
    let (head, rows) = again.split_once('\n').unwrap();
    assert!(
        head.starts_with("the same map again: median and middle half of "),
        "{text}"
    );
    assert_eq!(names(rows), ["by runs", "by pages", "ratio"], "{text}");
    let check = check.strip_prefix("DMA check\n").unwrap();
    let steps = names(times);
    let expected = [
        "populate",
        "pin",
        "find runs",
        "map",
        "attach",
        "DMA check",
        "unmap",
        "unpin",
    ];
    assert_eq!(steps, expected, "{text}");
    assert_eq!(
        masked(check, &["IOTLB"]),
        DMA.trim_start_matches('\n'),
        "{text}"
    );
}

#[test]
fn a_process_that_is_looked_at() {
    let pid = std::process::id().to_string();
    let text = shown(&["inspect", "--pid", &pid, "--no-times"]);
    let sections: Vec<_> = text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with(' '))
        .map(digits)
        .collect();
    let found: Vec<_> = sections.iter().map(String::as_str).collect();
    // What is not known is not a section where everything is known, and advice is not where none is needed.
    let optional = ["what would help", "not known"];
    let found: Vec<_> = found
        .into_iter()
        .filter(|name| !optional.contains(name))
        .collect();
    let first = found.first().copied().unwrap_or_default();
    assert!(first.starts_with("process # ("), "{text}");
    let expected = ["largest areas", "start: the kernel maps # KiB"];
    assert_eq!(found.get(1..), Some(&expected[..]), "{text}");
}

const MAP: &str = "
memory
  size # MiB
  backing 4k
  runs …
  addresses …

charge
  locked …
  steps # by runs, # page by page
  pin …

tables
  format amdv1, # levels
  leaves # of # KiB
  memory # table pages, # KiB, node #

";

const DMA: &str = "
  devices # read # MiB and wrote # MiB
  faults # inside the range; # of # accesses just outside it
  IOTLB …

OK every byte was right, and everything was given back
";
