//! User-Mode Linux where the processor has more registers than it knows of.
//!
//! It keeps the floating-point registers of its processes by `PTRACE_SETREGSET` with `NT_X86_XSTATE`, in
//! 2,696 bytes, which AVX-512 fills. With AMX the kernel's record has some 11,000, and it takes no part of
//! one: the guest ends with its first process. Where it is refused that record at its start, User-Mode
//! Linux does with `PTRACE_SETFPREGS` (Linux, `arch/x86/um/os-Linux/registers.c`). So it is refused here,
//! by a filter of system calls.

use std::collections::BTreeMap;
use std::fs;

use anyhow::Context as _;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

/// `ptrace` on x86-64.
const PTRACE: i64 = 101;
/// `PTRACE_GETREGSET`.
const GET_REGISTERS: u64 = 0x4204;
/// `NT_X86_XSTATE`.
const XSTATE: u64 = 0x202;
/// `EIO`, as from processors that have no such record.
const NO_SUCH_RECORD: u32 = 5;

/// For the guest's kernel, which hands it on to its first process: what glibc may not use (glibc, "Hardware
/// Capability Tunables").
const WITHOUT_AVX: &str = "GLIBC_TUNABLES=glibc.cpu.hwcaps=\
    -AVX2,-AVX512F,-AVX512VL,-AVX512BW,-AVX_Fast_Unaligned_Load";

/// Words for the guest's kernel about the processor.
pub(crate) fn words() -> &'static [&'static str] {
    match are_too_many() {
        true => &[WITHOUT_AVX],
        false => &[],
    }
}

/// True when the processor's record is larger than User-Mode Linux's.
pub(crate) fn are_too_many() -> bool {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = processors.lines();
    let flags = lines.find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "amx_tile"))
}

/// Refuses the record to this thread and to what it starts from now on.
pub(crate) fn refuse() -> anyhow::Result<()> {
    let is = |argument, value| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
    };
    let rule = SeccompRule::new(vec![is(0, GET_REGISTERS)?, is(2, XSTATE)?])?;
    let filter = SeccompFilter::new(
        BTreeMap::from([(PTRACE, vec![rule])]),
        SeccompAction::Allow,
        SeccompAction::Errno(NO_SUCH_RECORD),
        std::env::consts::ARCH.try_into()?,
    )?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program).context("no filter for system calls")
}
