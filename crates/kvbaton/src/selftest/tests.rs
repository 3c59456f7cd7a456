use super::*;

fn small() -> Selftest {
    Selftest {
        package: None,
        stated: Stated::default(),
        rounds: 50,
        contexts: vec![64],
        threads: 1,
        timeout: None,
        prediction_timeout: None,
    }
}

fn run() -> SelftestReport {
    let mut progress = |_: &[Probe], _: &str, _: &str| {};
    let mut probes = Probes::new(&mut progress);
    selftest(&small(), &mut probes).unwrap();
    probes.report(None)
}

fn find<'a>(report: &'a SelftestReport, group: &str, name: &str) -> &'a Probe {
    report.probes.iter().find(|p| p.group == group && p.name == name).unwrap()
}

#[test]
fn everything_that_runs_here_passes_and_the_rest_says_why_not() {
    let report = run();
    for probe in &report.probes {
        assert_ne!(probe.status, Status::Fail, "{probe:?}");
        assert_eq!(probe.because.is_some(), probe.status == Status::NotRun, "{probe:?}");
    }
    if !cfg!(target_os = "macos") {
        assert_eq!(report.verdict, "incomplete");
        let missing = report.probes.iter().filter(|p| p.group == "coreml");
        assert_eq!(missing.clone().count(), runtime::NAMES.len());
        assert!(missing.clone().all(|p| p.because.as_ref().unwrap().contains("needs macOS")));
    }
}

#[test]
fn both_versions_of_what_sources_disagree_on_are_told_apart() {
    let report = run();
    let locks = |group: &str| find(&report, group, "locked and input buffers").found.clone();
    let (strict, lenient) = (locks("fake"), locks("fake, lenient"));
    assert!(strict["surface, locked"].as_str().unwrap().starts_with("refused: "), "{strict:?}");
    assert!(strict["heap, after it was an input"].as_str().unwrap().starts_with("refused: "));
    assert_eq!(lenient["surface, locked"], "written elsewhere");
    for found in [strict, lenient] {
        assert_eq!(found["surface, fresh"], "written in place");
        assert_eq!(found["surface, unlocked again"], "written in place");
    }
    let strides = &find(&report, "fake", "strides").found;
    assert_eq!(strides["surface, rows of 100"]["result_bytes"], 256);
    assert_eq!(strides["heap, rows of 100"]["result_bytes"], 200);
    assert_eq!(find(&report, "fake", "state").found["adds_up"], true);
    for side in ["rows of 64", "rows of 96", "rows of 100"] {
        assert_eq!(find(&report, "fake", "sides of states").found[side]["outcome"], "works");
    }
}

#[test]
fn a_probe_that_fails_is_reported_not_returned() {
    let mut progress = |_: &[Probe], _: &str, _: &str| {};
    let mut probes = Probes::new(&mut progress);
    probes.run("g", "fails", || failed("it | does", found! {"x": 1}));
    probes.not_run("g", "cannot", "no reason");
    let report = probes.report(None);
    assert_eq!(report.verdict, "fail");
    let text = report.to_markdown();
    assert!(text.contains("| g | fails | **fail** | 0.00 | it \\| does; x: 1 |"), "{text}");
    assert!(text.contains("| g | cannot | not run |"));
    let json = text.split("```json\n").nth(1).unwrap().split("\n```").next().unwrap();
    let document: Value = serde_json::from_str(json).unwrap();
    assert_eq!(document["probes"][0]["found"]["x"], 1);
}

#[test]
fn a_probe_that_ends_the_process_is_named_in_what_is_left() {
    let (left, machine) = (std::cell::RefCell::new(String::new()), Machine::here());
    let mut progress = |done: &[Probe], group: &str, name: &str| {
        *left.borrow_mut() = SelftestReport::until(done, (group, name), &machine, None).to_markdown();
    };
    let mut probes = Probes::new(&mut progress);
    probes.run("g", "ends well", || Ok(found! {"x": 1}));
    probes.run("g", "aborts", || {
        let text = left.borrow();
        assert!(text.starts_with("# kvbaton selftest: fail"), "{text}");
        assert!(text.contains("| g | ends well | pass | 0.00 | x: 1 |"), "{text}");
        assert!(text.contains("| g | aborts | **fail** | 0.00 | it never ended"), "{text}");
        Ok(Map::new())
    });
}

#[test]
fn what_is_compiled_of_the_miniatures_goes_with_them() {
    let tally = Arc::new(Tally::default());
    let session = || {
        let counted = tally.clone();
        let programs = executed(1);
        Session::new(move || FakeRuntime::new(Habits::default(), counted.clone()).computing(programs.clone()))
    };
    let packages = Packages::unpack().unwrap();
    let folder = packages.prefill.parent().unwrap().to_owned();
    let mut progress = |_: &[Probe], _: &str, _: &str| {};
    let mut probes = Probes::new(&mut progress);
    runtime::probe("fake", session, &Selftest { rounds: 2, ..small() }, &packages, &mut probes);
    assert_eq!(probes.report(None).verdict, "pass");
    drop(packages);
    // Seven packages were compiled, each of them once, by whichever probe came first.
    let compiled = tally.compiled_to.lock().unwrap();
    assert_eq!(compiled.len(), 7);
    assert!(!folder.exists() && compiled.iter().all(|path| !path.exists()), "{compiled:?}");
}
