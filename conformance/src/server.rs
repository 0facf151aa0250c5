//! Linux's side: the program of `linux-pt/`, which keeps one table at a time.
//!
//! The protocol stands at the head of `linux-pt/server.c`.

use std::{
    collections::BTreeMap,
    io::{BufReader, Read as _, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};

/// Linux's formats; the numbers are those of `linux-pt/table.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinuxFormat {
    /// `generic_pt/fmt/amdv1.h` with its options off.
    AmdV1,
    /// The same as Linux builds it: the top grows, and every leaf is force-coherent.
    AmdV1Growing,
    /// `generic_pt/fmt/x86_64.h`.
    X86_64,
    /// `generic_pt/fmt/vtdss.h`.
    VtdSs,
    /// `generic_pt/fmt/riscv.h`.
    RiscV,
    /// `io-pgtable-arm.c`, stage 1.
    ArmStage1,
    /// `io-pgtable-arm.c`, stage 2.
    ArmStage2,
    /// `io-pgtable-arm-v7s.c`.
    ArmV7s,
    /// `io-pgtable-dart.c`, version 1.
    Dart1,
    /// `io-pgtable-dart.c`, version 2.
    Dart2,
}

impl LinuxFormat {
    /// True for the tables of `generic_pt`, which take whole ranges.
    pub const fn takes_ranges(self) -> bool {
        matches!(
            self,
            Self::AmdV1 | Self::AmdV1Growing | Self::X86_64 | Self::VtdSs | Self::RiscV
        )
    }
}

/// Options of a table, as in `linux-pt/table.h`.
pub mod option {
    /// The unit does not see the processor's caches when it walks.
    pub const INCOHERENT: u64 = 1 << 0;
    /// Accesses are snooped whatever the device asks for.
    pub const FORCE_COHERENT: u64 = 1 << 1;
    /// Input addresses are sign-extended.
    pub const SIGN_EXTENDED: u64 = 1 << 2;
    /// RISC-V: pages of 64 KiB.
    pub const SVNAPOT: u64 = 1 << 3;
    /// RISC-V: memory types.
    pub const SVPBMT: u64 = 1 << 4;
    /// Arm: the unit keeps dirty state.
    pub const DIRTY: u64 = 1 << 5;
    /// Arm: for the top of the address space.
    pub const UPPER: u64 = 1 << 6;
    /// Arm, stage 2: write-back is forced.
    pub const FORCED_WRITE_BACK: u64 = 1 << 7;
    /// Table memory is recycled, as where time is taken: the block that was freed last comes first.
    pub const RECYCLED: u64 = 1 << 8;
    /// With [`RECYCLED`]: it lies in huge pages, as a kernel's own view of memory does.
    pub const HUGE_MEMORY: u64 = 1 << 9;
}

/// A table of Linux as it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinuxConfig {
    /// The format.
    pub format: LinuxFormat,
    /// Bits of [`option`].
    pub options: u64,
    /// Bits of an input address.
    pub input_bits: u32,
    /// Bits of an output address.
    pub output_bits: u32,
    /// Levels, where they are chosen (`generic_pt`).
    pub levels: u8,
    /// Sizes of pages, where they are chosen (`io-pgtable`).
    pub page_sizes: u64,
}

impl LinuxConfig {
    /// True when all of these options are set.
    pub const fn has(&self, options: u64) -> bool {
        self.options & options == options
    }
}

/// A block of table memory: at least one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Its length.
    pub bytes: u64,
    /// The words that are not 0, by index.
    pub words: BTreeMap<u64, u64>,
}

/// All table memory of Linux at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dump {
    /// Levels, where the table's own registers tell.
    pub levels: Option<u8>,
    /// The tables that stand side by side as the root.
    pub roots: Vec<u64>,
    /// Every block that is handed out, by address.
    pub blocks: BTreeMap<u64, Block>,
}

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) result: u64,
    pub(crate) complaints: u64,
    pub(crate) words: Vec<u64>,
}

/// The program, running.
#[derive(Debug)]
pub struct Server {
    child: Child,
    /// The program ends when this does.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    complaints: u64,
}

impl Server {
    /// Starts it.
    pub fn start(program: &Path) -> anyhow::Result<Self> {
        Self::start_with(Command::new(program), program)
    }

    /// Starts it by a command that is given it: an instrument that looks on. What the command
    /// itself says goes to the standard error output.
    pub fn start_under(command: &[&str], program: &Path) -> anyhow::Result<Self> {
        let Some((instrument, arguments)) = command.split_first() else {
            return Self::start(program);
        };
        let mut command = Command::new(instrument);
        command.args(arguments).arg(program);
        Self::start_with(command, program)
    }

    fn start_with(mut command: Command, program: &Path) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.context("the server has no pipes")?;
        Ok(Self {
            child,
            input: Some(input),
            output: BufReader::with_capacity(1 << 20, output),
            complaints: 0,
        })
    }

    fn word(&mut self) -> anyhow::Result<u64> {
        let mut bytes = [0; 8];
        self.output
            .read_exact(&mut bytes)
            .context("the server ended; its exit status says why (linux-pt/shim.c)")?;
        Ok(u64::from_ne_bytes(bytes))
    }

    pub(crate) fn ask(&mut self, number: u64, arguments: &[u64]) -> anyhow::Result<Answer> {
        let mut request = [0; 8];
        let words = std::iter::once(&number).chain(arguments);
        request
            .iter_mut()
            .zip(words)
            .for_each(|(to, from)| *to = *from);
        let bytes: Vec<u8> = request.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let to = self.input.as_mut().context("the server was ended")?;
        to.write_all(&bytes)?;
        to.flush()?;
        let (result, complaints, count) = (self.word()?, self.word()?, self.word()?);
        let words = (0..count).map(|_| self.word()).collect::<Result<_, _>>()?;
        self.complaints += complaints;
        Ok(Answer {
            result,
            complaints,
            words,
        })
    }

    /// How often Linux's code complained (`WARN_ON`) since the last call.
    pub fn take_complaints(&mut self) -> u64 {
        std::mem::take(&mut self.complaints)
    }

    /// Makes a table whose memory begins at `base`; the sizes of its pages.
    pub fn create(&mut self, config: &LinuxConfig, base: u64) -> anyhow::Result<u64> {
        let answer = self.ask(
            0,
            &[
                config.format as u64,
                config.options,
                config.input_bits.into(),
                config.output_bits.into(),
                config.levels.into(),
                config.page_sizes,
                base,
            ],
        )?;
        ensure!(
            answer.result == 0,
            "Linux makes no such table (errno {}, complaints: {}): {config:?}",
            answer.result,
            answer.complaints
        );
        answer.words.first().copied().context("no page sizes")
    }

    /// Maps, or leaves nothing mapped of what was asked for; the errno if so.
    pub fn map(&mut self, iova: u64, pa: u64, len: u64, prot: u32) -> anyhow::Result<u64> {
        Ok(self.ask(1, &[iova, pa, len, prot.into()])?.result)
    }

    /// Unmaps; how many bytes.
    pub fn unmap(&mut self, iova: u64, len: u64) -> anyhow::Result<u64> {
        Ok(self.ask(2, &[iova, len])?.result)
    }

    /// The address behind `iova`, or 0.
    pub fn translate(&mut self, iova: u64) -> anyhow::Result<u64> {
        Ok(self.ask(3, &[iova])?.result)
    }

    /// The bytes of all tables.
    pub fn dump(&mut self) -> anyhow::Result<Dump> {
        let answer = self.ask(4, &[])?;
        let mut words = answer.words.into_iter();
        let mut word = || words.next();
        let mut read = || {
            let levels = word()?;
            let roots = (0..word()?).map(|_| word()).collect::<Option<_>>()?;
            let mut dump = Dump {
                levels: u8::try_from(levels).ok().filter(|levels| *levels > 0),
                roots,
                blocks: BTreeMap::new(),
            };
            while let Some(address) = word() {
                let bytes = word()?;
                let words = (0..word()?)
                    .map(|_| Some((word()?, word()?)))
                    .collect::<Option<_>>()?;
                dump.blocks.insert(address, Block { bytes, words });
            }
            Some(dump)
        };
        read().context("a dump that ends too soon")
    }

    /// Ends the program and waits for it, so that an instrument can write down what it saw.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.input = None;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }

    /// Takes the table down. All its memory must come back.
    pub fn destroy(&mut self) -> anyhow::Result<()> {
        let left = self.ask(5, &[])?.result;
        if left != 0 {
            bail!("Linux's table was taken down, and pages are left: {left}");
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Servers end by themselves when their input does; this one has nothing more to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
