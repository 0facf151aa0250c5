//! The client against a stub that plays a script.

use std::thread::{self, JoinHandle};

use super::*;

/// Bytes that the stub reads, and its answer to them.
type Line = (&'static str, &'static str);

/// A client, and the other side, which ends when the script does; it yields what was left to be read.
fn scripted(script: Vec<Line>) -> (Stub, JoinHandle<Vec<u8>>) {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let stub = thread::spawn(move || {
        for (request, answer) in script {
            let mut read = vec![0; request.len()];
            theirs.read_exact(&mut read).unwrap();
            assert_eq!(String::from_utf8_lossy(&read), request);
            theirs.write_all(answer.as_bytes()).unwrap();
        }
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        theirs.read_to_end(&mut rest).unwrap();
        rest
    });
    (Stub::unasked(ours), stub)
}

fn ends(stub: Stub, other: JoinHandle<Vec<u8>>, rest: &str) {
    drop(stub);
    assert_eq!(String::from_utf8_lossy(&other.join().unwrap()), rest);
}

const ASK: &str = "$p1#a1";
const OK: &str = "+$OK#9a";

#[test]
fn a_request_is_sent_again_when_the_stub_wants_it() {
    let (mut stub, other) = scripted(vec![(ASK, "-"), (ASK, "-"), (ASK, OK)]);
    assert_eq!(stub.ask("p1").unwrap(), b"OK");
    ends(stub, other, "+");
    let (mut stub, other) = scripted(vec![(ASK, "-"), (ASK, "-"), (ASK, "-")]);
    let error = stub.ask("p1").unwrap_err();
    assert!(matches!(error, Error::NotUnderstood { .. }), "{error}");
    // Nothing is sent any more.
    let error = stub.ask("p1").unwrap_err();
    assert!(matches!(error, Error::OutOfStep { .. }), "{error}");
    ends(stub, other, "");
}

#[test]
fn an_answer_is_asked_for_again_when_it_is_damaged() {
    let script = vec![(ASK, "+$OK#9b"), ("-", "$OJ#9a"), ("-", "$OK#9a")];
    let (mut stub, other) = scripted(script);
    assert_eq!(stub.ask("p1").unwrap(), b"OK");
    ends(stub, other, "+");
    let script = vec![(ASK, "+$OK#9b"), ("-", "$OK#9c"), ("-", "$OK#9d")];
    let (mut stub, other) = scripted(script);
    let error = stub.ask("p1").unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    ends(stub, other, "");
}

#[test]
fn refusals_are_reported_and_the_next_request_goes() {
    let refused = |answer| vec![(ASK, answer), ("+", ""), (ASK, OK), ("+", "")];
    for answer in ["+$E22#a9", "+$#00"] {
        let (mut stub, other) = scripted(refused(answer));
        let error = stub.ask("p1").unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert_eq!(stub.ask("p1").unwrap(), b"OK");
        ends(stub, other, "");
    }
}

#[test]
fn no_operation_waits_for_ever() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let mut stub = Stub::unasked(ours);
    stub.patience = Duration::from_millis(1);
    let error = stub.ask("p1").unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
}

#[test]
fn a_stub_that_is_gone_is_named() {
    let (mut stub, other) = scripted(vec![(ASK, "+$O")]);
    let error = stub.ask("p1").unwrap_err();
    assert!(matches!(error, Error::Closed { .. }), "{error}");
    ends(stub, other, "");
}

#[test]
fn what_was_not_asked_for_is_no_answer() {
    let (mut stub, other) = scripted(vec![(ASK, "$OK#9a")]);
    let error = stub.ask("p1").unwrap_err();
    assert!(matches!(error, Error::Garbled { .. }), "{error}");
    ends(stub, other, "");
}

#[test]
fn what_the_monitor_prints_comes_in_pieces() {
    // `help`: two pieces and the end.
    let script = vec![
        ("$qRcmd,68656c70#fc", "+$O6f6e#86"),
        ("+", "$O65#ba"),
        ("+", "$OK#9a"),
    ];
    let (mut stub, other) = scripted(script);
    assert_eq!(stub.monitor("help").unwrap(), "one");
    ends(stub, other, "+");
}

#[test]
fn registers_are_found_by_name_and_read_after_they_are_written() {
    let describe = |stub: &mut Stub| {
        let register = target::Register {
            number: 1,
            bytes: 4,
        };
        stub.registers.insert("r1".into(), register);
    };
    let write = "$P1=78563412#62";
    let script = vec![(write, OK), ("+$p1#a1", "+$78563412#a4"), ("+", "")];
    let (mut stub, other) = scripted(script);
    describe(&mut stub);
    let error = stub.register("r2").unwrap_err();
    assert!(matches!(error, Error::NoRegister(_)), "{error}");
    stub.set_register("r1", 0x1234_5678).unwrap();
    ends(stub, other, "");
    // The stub says that it has done it, and has not.
    let script = vec![(write, OK), ("+$p1#a1", "+$00000000#80"), ("+", "")];
    let (mut stub, other) = scripted(script);
    describe(&mut stub);
    let error = stub.set_register("r1", 0x1234_5678).unwrap_err();
    assert!(
        matches!(error, Error::NotWritten { found: 0, .. }),
        "{error}"
    );
    ends(stub, other, "");
}
