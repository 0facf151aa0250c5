//! Numbers, sizes and offsets beside those that a C compiler finds in the kernel's headers.
//!
//! The headers are those of the machine, or of the directory in `UAPI_HEADERS` (like
//! `usr/include` of an unpacked `linux-libc-dev`). Rows that they are too old for are skipped and
//! reported.

use std::io::Write as _;
use std::process::Command;
use std::string::{String, ToString as _};
use std::vec::Vec;
use std::{env, format, fs, io};

/// A version of Linux whose headers have what is compared.
pub(crate) type Since = (u32, u32);

/// One comparison: an expression in C, and what it must be.
pub(crate) struct Row {
    since: Since,
    expression: String,
    ours: u64,
}

/// The expression `c` of headers from `since` on is `ours`.
pub(crate) fn row(since: Since, c: &str, ours: u64) -> Row {
    let expression = c.to_string();
    Row {
        since,
        expression,
        ours,
    }
}

/// Rows for the size of a structure and the offsets of its fields, named as in C but for `type_`.
macro_rules! layout {
    ($rows:ident, $since:expr, $type:ident { $($field:ident),* }) => {
        let name = stringify!($type);
        let size = size_of::<$type>() as u64;
        $rows.push(row($since, &std::format!("sizeof(struct {name})"), size));
        $(
            let field = stringify!($field).trim_end_matches('_');
            let offset = core::mem::offset_of!($type, $field) as u64;
            $rows.push(row($since, &std::format!("offsetof(struct {name}, {field})"), offset));
        )*
    };
}
pub(crate) use layout;

/// Fails when a row is not what the compiler says of `header`.
pub(crate) fn compare(test: &str, header: &str, rows: &[Row]) {
    let Some(found) = evaluate(test, header, rows) else {
        return;
    };
    let answers = found.lines().filter_map(|line| line.split_once(' '));
    let mut compared = 0;
    for (index, value) in answers {
        let row = &rows[index.parse::<usize>().unwrap()];
        assert_eq!(value.parse(), Ok(row.ours), "{}", row.expression);
        compared += 1;
    }
    if compared < rows.len() {
        let missing = rows.len() - compared;
        let why = format!("{missing} of {} rows: the headers are too old", rows.len());
        skipped(test, &why);
    }
}

/// Output of the compiler: the numbers of the rows that the headers are new enough for, and their values.
fn evaluate(test: &str, header: &str, rows: &[Row]) -> Option<String> {
    let mut program = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/version.h>\n\
         #if __has_include(<{header}>)\n#include <{header}>\n#else\n\
         #undef LINUX_VERSION_CODE\n#define LINUX_VERSION_CODE 0\n#endif\nint main(void) {{\n"
    );
    for (index, row) in rows.iter().enumerate() {
        let ((major, minor), expression) = (row.since, &row.expression);
        program += &format!(
            "#if LINUX_VERSION_CODE >= KERNEL_VERSION({major}, {minor}, 0)\n\
             printf(\"{index} %llu\\n\", (unsigned long long)({expression}));\n#endif\n"
        );
    }
    program += "return 0;\n}\n";
    let directory = env::temp_dir().join(format!("dmaspace-{test}-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let (source, binary) = (directory.join("rows.c"), directory.join("rows"));
    fs::write(&source, program).unwrap();
    let mut compiler = Command::new("cc");
    if let Some(headers) = env::var_os("UAPI_HEADERS") {
        compiler.arg("-isystem").arg(headers);
    }
    let output = compiler.arg("-o").arg(&binary).arg(&source).output();
    let found = match output {
        Err(error) => {
            skipped(test, &format!("no C compiler: {error}"));
            None
        }
        Ok(output) => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{complaint}");
            let found = Command::new(&binary).output().unwrap();
            assert!(found.status.success());
            Some(String::from_utf8(found.stdout).unwrap())
        }
    };
    fs::remove_dir_all(&directory).unwrap();
    found
}

/// Says past the test harness, which keeps what passing tests print, that a test did less.
fn skipped(test: &str, why: &str) {
    let line = format!("SKIPPED {test}: {why}\n");
    io::stderr().write_all(line.as_bytes()).unwrap();
}

/// The rows of ioctls by their names.
pub(crate) fn requests(since: Since, requests: &[(&str, u32)]) -> Vec<Row> {
    requests
        .iter()
        .map(|&(name, number)| row(since, name, number.into()))
        .collect()
}
