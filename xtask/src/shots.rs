//! Screenshots of the reports that a browser shows, as `docs/shots` has them.
//!
//! Not a part of the test command: they differ with the machine. Chromium takes them without a screen, in the
//! light colours and in the dark ones. It is the program of Debian's package `chromium-headless-shell`: a
//! browser with a window takes its frame off the size that it is told.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::cargo::{self, Repository};

/// The options of `cargo xtask shots`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Options {
    /// Only those with this in their name.
    #[arg(long, value_name = "NAME", default_value = "")]
    only: String,
    /// The program that writes the reports, if it is not to be built.
    #[arg(long, value_name = "PROGRAM")]
    program: Option<PathBuf>,
}

/// What is shown.
struct Shot {
    /// The file's name, without its ending.
    name: &'static str,
    /// What it ends in: `svg` or `html`.
    ending: &'static str,
    /// The arguments of dmaspace, but for the file that it writes, which comes last.
    command: &'static [&'static str],
}

const fn shot(name: &'static str, ending: &'static str, command: &'static [&'static str]) -> Shot {
    Shot {
        name,
        ending,
        command,
    }
}

/// Stands for an image of tables in a command.
const IMAGE: &str = "IMAGE";

/// All of them. A new report is a line here.
const SHOTS: &[Shot] = &[
    shot(
        "map",
        "svg",
        &[
            "map",
            "--size",
            "64M",
            "--backing",
            "memfd",
            "--format",
            "amdv1",
            "--svg",
        ],
    ),
    shot("tables", "svg", &["tables", "picture", IMAGE, "--svg"]),
    shot("bench", "html", &["bench", "all", "--quick", "--html"]),
    shot("numa-simulate", "svg", &["numa", "simulate", "--svg"]),
];

/// The browser's program, and the Debian package that has it.
const BROWSER: &str = "chromium-headless-shell";

/// Where they are kept.
const DIRECTORY: &str = "docs/shots";

/// Width and height of a page that does not say its own.
const PAGE: (u32, u32) = (1100, 1600);

/// Takes them anew.
pub(crate) fn run(options: &Options, repository: &Repository) -> anyhow::Result<bool> {
    let work = repository.metadata.target_directory.join("shots");
    let kept = repository.root.join(DIRECTORY);
    fs::create_dir_all(&work)?;
    fs::create_dir_all(&kept)?;
    let image = work.join("tables.img");
    for shot in SHOTS
        .iter()
        .filter(|shot| shot.name.contains(&options.only))
    {
        let Shot { name, ending, .. } = shot;
        if shot.command.contains(&IMAGE) {
            let live = ["run", "--release", "--quiet", "--package", "dmaspace-iopt"];
            let mut live = repository.cargo(&live);
            cargo::run(live.args(["--example", "live_tables", "--"]).arg(&image))?;
        }
        let mut dmaspace = match &options.program {
            Some(program) => Command::new(program),
            None => {
                let run = [
                    "run",
                    "--release",
                    "--quiet",
                    "--package",
                    "dmaspace-cli",
                    "--",
                ];
                repository.cargo(&run)
            }
        };
        dmaspace.args(shot.command.iter().map(|word| match *word {
            IMAGE => image.as_str(),
            word => word,
        }));
        let report = work.join(format!("{name}.{ending}"));
        cargo::run(dmaspace.arg(&report).stdout(Stdio::null()))?;
        let size = size(&fs::read_to_string(&report)?).unwrap_or(PAGE);
        for (scheme, dark) in [("", false), ("-dark", true)] {
            let file = kept.join(format!("{name}{scheme}.png"));
            photograph(report.as_std_path(), &file, size, dark)?;
            println!("{DIRECTORY}/{name}{scheme}.png");
        }
    }
    Ok(true)
}

fn photograph(
    report: &Path,
    file: &Path,
    (width, height): (u32, u32),
    dark: bool,
) -> anyhow::Result<()> {
    // A directory of its own, so that one that is open is not disturbed.
    let profile = report.with_extension("profile");
    if file.exists() {
        fs::remove_file(file)?;
    }
    let mut command = Command::new(BROWSER);
    command
        .args(["--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("--window-size={width},{height}"))
        .arg(format!("--screenshot={}", file.display()))
        // 0 is dark, 1 is light.
        .arg(format!(
            "--blink-settings=preferredColorScheme={}",
            u8::from(!dark)
        ))
        .arg(format!("file://{}", report.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let status = command.status().with_context(|| {
        format!("{BROWSER} cannot be started; as root: apt-get install {BROWSER}")
    })?;
    ensure!(status.success(), "{BROWSER} ended with {status}");
    ensure!(file.exists(), "{BROWSER} has written no {}", file.display());
    Ok(())
}

/// Width and height of a picture, as its first element says.
fn size(report: &str) -> Option<(u32, u32)> {
    let element = report.strip_prefix("<svg ")?.split_once('>')?.0;
    let number = |name: &str| {
        let (_, value) = element.split_once(&format!("{name}=\""))?;
        value.split_once('"')?.0.parse().ok()
    };
    Some((number(" width")?, number(" height")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_says_its_size_and_a_page_does_not() {
        let svg =
            "<svg xmlns=\"x\" width=\"960\" height=\"216\" viewBox=\"0 0 1 2\"><rect width=\"1\"/>";
        assert_eq!(size(svg), Some((960, 216)));
        assert_eq!(
            size("<svg xmlns=\"x\"><rect width=\"1\" height=\"2\"/>"),
            None
        );
        assert_eq!(size("<!doctype html><svg width=\"1\" height=\"2\">"), None);
    }

    #[test]
    fn no_two_shots_have_the_same_name() {
        for (nth, shot) in SHOTS.iter().enumerate() {
            assert!(SHOTS[..nth].iter().all(|other| other.name != shot.name));
        }
    }
}
