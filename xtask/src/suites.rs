//! Test programs side by side: Cargo builds them and runs one after the other; here each processor has one at a time.
//!
//! Within a program one test runs at a time, since tests count tables and system calls of their process, and readers in
//! other threads hold tables back. Pools of huge pages and limits on locked memory belong to the whole machine: of the
//! programs that use them one runs at a time, as `.config/nextest.toml` has it for the sanitizers.

use std::{
    cmp::Reverse,
    collections::VecDeque,
    env,
    ffi::OsString,
    fs::{self, File},
    io::{self, BufReader, Write as _},
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use cargo_metadata::{Artifact, Message};

use crate::cargo::{self, Repository};

/// Variable with proptest's seed.
pub(crate) const SEED: &str = "PROPTEST_RNG_SEED";

/// A net: time of a program, many times what the longest takes.
const PATIENCE: Duration = Duration::from_secs(40 * 60);

/// Which tests run, and how.
#[derive(Default)]
pub(crate) struct Suites<'a> {
    /// Cargo's options: packages, features and targets.
    pub(crate) selection: Vec<&'a str>,
    /// Only tests with this in their names.
    pub(crate) filter: Option<&'a str>,
    /// Variables of the programs.
    pub(crate) environment: Vec<(&'static str, OsString)>,
}

/// A test program.
struct Program {
    name: String,
    path: PathBuf,
    /// The directory of its package, in which Cargo runs it.
    directory: PathBuf,
    /// True when it uses what belongs to the whole machine.
    machine: bool,
}

/// Programs that have not run.
struct Waiting {
    programs: VecDeque<Program>,
    /// True while one runs that uses what belongs to the whole machine.
    machine: bool,
}

impl Suites<'_> {
    /// Builds the programs and runs all of them; an error names those that failed.
    pub(crate) fn run(&self, repository: &Repository) -> anyhow::Result<()> {
        let waiting = Mutex::new(Waiting {
            programs: self.build(repository)?,
            machine: false,
        });
        let failed = Mutex::new(Vec::new());
        let some = AtomicBool::new(false);
        let workers = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some(program) = next(&waiting) {
                        let result = self.run_one(&program, &some);
                        if program.machine {
                            lock(&waiting).machine = false;
                        }
                        if let Err(error) = result {
                            lock(&failed).push(format!("{}: {error:#}", program.name));
                        }
                    }
                });
            }
        });
        let failed = lock(&failed);
        ensure!(failed.is_empty(), "tests failed: {}", failed.join("; "));
        ensure!(some.into_inner(), "no test is selected");
        Ok(())
    }

    fn build(&self, repository: &Repository) -> anyhow::Result<VecDeque<Program>> {
        let mut command = repository.cargo(&["test", "--no-run"]);
        command.args(&self.selection);
        println!("$ {}", cargo::show(&command));
        let mut child = command
            .arg("--message-format=json-render-diagnostics")
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().context("no output")?;
        let mut programs = VecDeque::new();
        for message in Message::parse_stream(BufReader::new(output)) {
            if let Message::CompilerArtifact(artifact) = message? {
                programs.extend(Program::of(artifact)?);
            }
        }
        let status = child.wait()?;
        ensure!(status.success(), "the tests do not compile: {status}");
        ensure!(!programs.is_empty(), "no test program is selected");
        // First programs that wait for each other, then long ones, so that none is left alone at the end: all interleavings of
        // the models, and large programs.
        programs.make_contiguous().sort_by_cached_key(|program| {
            let size = fs::metadata(&program.path).map_or(0, |file| file.len());
            let models = program.name.starts_with("models,");
            (!program.machine, !models, Reverse(size))
        });
        Ok(programs)
    }

    /// Sets `some` where there are tests to run.
    fn run_one(&self, program: &Program, some: &AtomicBool) -> anyhow::Result<()> {
        println!("  runs    {}", program.name);
        let started = Instant::now();
        // A file, since a pipe stays open for as long as a child does that a test has left behind.
        let log = program.path.with_extension("log");
        let file = File::create(&log)?;
        let mut command = Command::new(&program.path);
        command
            .args(self.filter)
            .current_dir(&program.directory)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .env("CARGO_MANIFEST_DIR", &program.directory)
            .env("RUST_TEST_THREADS", "1")
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        let mut child = command.spawn()?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if started.elapsed() > PATIENCE {
                child.kill()?;
                child.wait()?;
                break None;
            }
            thread::sleep(Duration::from_millis(50));
        };
        let said = fs::read(&log)?;
        let mut lines = said.split(|byte| *byte == b'\n');
        let any = lines.any(|line| line.starts_with(b"running ") && line != b"running 0 tests");
        some.fetch_or(any, Relaxed);
        let mut out = io::stdout().lock();
        let seconds = started.elapsed().as_secs_f64();
        writeln!(out, "\n  ran     {} in {seconds:.1} s", program.name)?;
        out.write_all(&said)?;
        let status = status.with_context(|| format!("no end after {PATIENCE:?}"))?;
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

impl Program {
    /// That which Cargo has built, if it is a test.
    fn of(artifact: Artifact) -> anyhow::Result<Option<Self>> {
        let Some(path) = artifact.executable.filter(|_| artifact.profile.test) else {
            return Ok(None);
        };
        let directory = artifact.manifest_path.parent().context("no directory")?;
        let package = directory.file_name().unwrap_or_default();
        let target = &artifact.target;
        let machine = match package {
            "dmaspace-cli" => true,
            "dmaspace" | "hostmem" => target.is_test(),
            "ioas" => target.name == "linux",
            "bench" => target.name == "origins",
            _ => false,
        };
        Ok(Some(Self {
            name: format!("{package}, {}", target.name),
            machine,
            path: path.into(),
            directory: directory.into(),
        }))
    }
}

/// The next program that may run now. Without one a worker ends: that of the machine's takes the rest.
fn next(waiting: &Mutex<Waiting>) -> Option<Program> {
    let mut waiting = lock(waiting);
    let taken = waiting.machine;
    let mut programs = waiting.programs.iter();
    let at = programs.position(|program| !(taken && program.machine))?;
    let program = waiting.programs.remove(at)?;
    waiting.machine |= program.machine;
    Some(program)
}

/// Nothing in these is half done when a thread panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Inputs of properties in CI, the same each time, unless a seed was chosen.
pub(crate) fn settled(ci: bool) -> Vec<(&'static str, OsString)> {
    if ci && env::var_os(SEED).is_none() {
        vec![(SEED, "1".into())]
    } else {
        vec![]
    }
}
