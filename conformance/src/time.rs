//! `time`: one kind of work of Linux's tables, also under an instrument.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use conformance::{
    build::{self, Purpose},
    server::{Server, option},
    timing::{self, Kind, TimedTable, Work},
};

/// Times one kind of work of Linux's tables.
#[derive(Args)]
pub(crate) struct Options {
    /// The table; all, where none is named.
    #[arg(long, value_name = "NAME")]
    format: Option<String>,
    /// The kind of work.
    #[arg(long, value_enum, default_value = "unmap")]
    kind: Kind,
    /// Bytes of a page; K, M and G may stand behind the number.
    #[arg(long, default_value = "4K", value_parser = bytes)]
    page: u64,
    /// Pages of one operation.
    #[arg(long, default_value_t = 256)]
    count: u64,
    /// Batches that are timed.
    #[arg(long, default_value_t = 101)]
    batches: u64,
    /// The other half of the tables is mapped.
    #[arg(long)]
    half: bool,
    /// Leaves are not gathered.
    #[arg(long)]
    queued: bool,
    /// All pages are dirty.
    #[arg(long)]
    dirty: bool,
    /// Table memory in huge pages.
    #[arg(long)]
    huge: bool,
    /// The compiler.
    #[arg(long, default_value = "gcc")]
    compiler: String,
    /// A command that the program runs under, its words separated by blanks.
    #[arg(long, value_name = "COMMAND", default_value = "")]
    under: String,
}

/// Times, and prints what was measured.
pub(crate) fn time(options: &Options, source: &Path, directory: &Path) -> anyhow::Result<()> {
    let mut tables = timing::tables()?;
    if let Some(name) = &options.format {
        let names: Vec<_> = tables.iter().map(|table| table.name).collect();
        tables.retain(|table| table.name == name);
        let no_table = || format!("no table {name}; there are {}", names.join(", "));
        ensure!(!tables.is_empty(), no_table());
    }
    let program = build::build(source, directory, &options.compiler, Purpose::Time)?;
    let work = Work {
        kind: options.kind,
        page: options.page,
        count: options.count,
        half: options.half,
        queued: options.queued,
        dirty: options.dirty,
    };
    println!("{work:?}, {}, ns of one operation:", options.compiler);
    for mut table in tables {
        if options.huge {
            table.config.options |= option::HUGE_MEMORY;
        }
        let line = one(options, &program, &table, &work);
        // A size that this format has not, for one: the others go on.
        let line = line.unwrap_or_else(|error| format!("{error:#}"));
        println!("  {:<14} {line}", table.name);
    }
    Ok(())
}

fn one(
    options: &Options,
    program: &Path,
    table: &TimedTable,
    work: &Work,
) -> anyhow::Result<String> {
    let under: Vec<_> = options.under.split_whitespace().collect();
    let mut server = Server::start_under(&under, program)?;
    server.create_timed(&table.config)?;
    let samples = server.time(work, options.batches)?;
    server.destroy()?;
    server.end()?;
    let Some(mut samples) = samples else {
        return Ok("not offered".to_owned());
    };
    samples.sort_by(f64::total_cmp);
    let middle = samples.get(samples.len() / 2).context("no batches")?;
    let (least, most) = samples.first().zip(samples.last()).context("no batches")?;
    Ok(format!(
        "least {least:>11.1}   median {middle:>11.1}   most {most:>11.1}"
    ))
}

fn bytes(text: &str) -> anyhow::Result<u64> {
    let digits = text.trim_end_matches(['K', 'M', 'G']);
    let number: u64 = digits.parse()?;
    let unit = match text.strip_prefix(digits) {
        Some("") => 1,
        Some("K") => 1 << 10,
        Some("M") => 1 << 20,
        Some("G") => 1 << 30,
        _ => bail!("a number, and K, M or G behind it"),
    };
    number.checked_mul(unit).context("too many bytes")
}
