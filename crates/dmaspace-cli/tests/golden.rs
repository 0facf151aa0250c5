//! Reports of real runs to the letter, with figures that differ from run to run masked: `#`.
//!
//! Reports of given values are beside what writes them (`src/report`), those of given files in `tables.rs` and
//! `numa.rs`.

// The lints' exception for tests covers test functions, not what they share.
#![allow(clippy::unwrap_used)]

mod common;

use common::{dmaspace, run};

/// Numbers as `#`, spaces as one; left out is what depends on the machine behind a name in `any`.
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
fn a_check_of_small_pages() {
    let options = "check --size 4M --backing 4k --devices 1 --format amdv1 --max-leaf 4k";
    let options: Vec<_> = options.split(' ').collect();
    let text = shown(&options);
    let (head, rest) = text.split_once("  step  ").unwrap();
    let found = masked(head, &["addresses", "pinned"]);
    assert_eq!(found, HEAD.trim_start_matches('\n'), "{text}");
    let (steps, rest) = rest.split_once("\n\n").unwrap();
    // Times change their unit with the machine's load.
    let line = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let units = ["ns", "µs", "ms", "s"];
        let at = words.iter().position(|word| units.contains(word)).unwrap();
        digits(
            &[&words[..at - 1], &["TIME"], &words[at + 1..]]
                .concat()
                .join(" "),
        )
    };
    let found: Vec<_> = steps.lines().skip(1).map(line).collect();
    assert_eq!(found, STEPS.trim().lines().collect::<Vec<_>>(), "{text}");
    let (again, end) = rest.split_once("\n\n").unwrap();
    let mut again = again.lines();
    let head = again.next().unwrap();
    assert!(
        head.starts_with("the same map again: median and middle half of "),
        "{text}"
    );
    let names: Vec<_> = again.map(|line| line[2..14].trim()).collect();
    assert_eq!(names, ["by runs", "by pages", "ratio"], "{text}");
    assert_eq!(masked(end, &[]), END.trim_start_matches('\n'), "{text}");
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
    // "not known" is no section where everything is known, nor is advice where none is needed.
    let optional = ["changes that help", "not known"];
    let found: Vec<_> = found
        .into_iter()
        .filter(|name| !optional.contains(name))
        .collect();
    let first = found.first().copied().unwrap_or_default();
    assert!(first.starts_with("process # ("), "{text}");
    let expected = ["largest areas", "start: the kernel maps # KiB"];
    assert_eq!(found.get(1..), Some(&expected[..]), "{text}");
}

const HEAD: &str = "
  memory # MiB; node #
  backing 4k
  addresses …
  pinned …
  tables amdv1, # levels, # table pages; node #

";

const STEPS: &str = "
memory # MiB TIME # % in huge pages
attach # B TIME # device, # table
pin # MiB TIME # MiB charged in # step, not #
find runs # MiB TIME # runs
map # MiB TIME # leaves of up to # KiB, # table pages
DMA # MiB TIME each of # device had every page
hole # KiB TIME out of a leaf of # KiB; now # leaves
close hole # KiB TIME # leaves again
track # MiB TIME # leaves of # KiB
harvest # KiB TIME # pages as written, then # bytes
merge # MiB TIME # leaves again
release # MiB TIME # KiB stay pinned
restore # MiB TIME # MiB pinned again, zeros found
unmap # MiB TIME # MiB compared by the processor
close # B TIME ledger, pins, tables, kernel: #
";

const END: &str = "
  DMA # device read # MiB and wrote # MiB; # bytes wrong
  faults # expected, # unexpected, # missing

OK every byte was right, and everything was given back
";
