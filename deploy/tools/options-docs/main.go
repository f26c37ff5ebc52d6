// Command options-docs writes the reference of the binaries' options from what they print with --help, as packages flag and
// github.com/spf13/pflag format it.
//
//	options-docs docs/options.md <binary>:<prefix of its environment variables> …
package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: options-docs <file> <binary>:<environment prefix> …")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "options-docs:", err)
		os.Exit(1)
	}
}

func run(file string, binaries []string) error {
	var page bytes.Buffer
	fmt.Fprintln(&page, "<!-- Generated from what the binaries print with --help by options-docs. DO NOT EDIT. -->")
	fmt.Fprintln(&page, "# Options")
	fmt.Fprintln(&page)
	fmt.Fprintln(&page, "Every option is a flag and an environment variable; the flag wins.")
	for _, argument := range binaries {
		binary, prefix, _ := strings.Cut(argument, ":")
		usage, err := help(binary)
		if err != nil {
			return err
		}
		options := parse(usage)
		if len(options) == 0 {
			return fmt.Errorf("%s --help shows no options:\n%s", binary, usage)
		}
		section(&page, filepath.Base(binary), prefix, options)
	}
	return os.WriteFile(file, page.Bytes(), 0o644)
}

// help returns what the binary prints with --help, without anything that its environment could put into the defaults.
func help(binary string) (string, error) {
	command := exec.Command(binary, "--help")
	command.Env = []string{}
	usage, err := command.CombinedOutput()
	// Some programs take a call for help as a mistake.
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		return "", fmt.Errorf("running %s --help: %w", binary, err)
	}
	return string(usage), nil
}

type option struct {
	name, kind, usage, standard string
}

var (
	// pflag: "      --name kind   What it does. (default x)".
	long = regexp.MustCompile(`^ +(?:-\w, )?--([a-z][a-z0-9-]*)(?: (\S+))? {2,}(.*)$`)
	// flag: "  -name kind", then the usage below.
	short = regexp.MustCompile(`^ {2}-([a-z][a-z0-9-]*)(?: (\S+))?$`)

	standard = regexp.MustCompile(`(?s)^(.*?)\s*\(default (.*)\)$`)
)

// parse reads options in either format.
func parse(usage string) []option {
	var options []option
	for line := range strings.Lines(usage) {
		line = strings.TrimRight(line, "\n")
		if m := long.FindStringSubmatch(line); m != nil {
			options = append(options, option{name: m[1], kind: m[2], usage: m[3]})
		} else if m := short.FindStringSubmatch(line); m != nil {
			options = append(options, option{name: m[1], kind: m[2]})
		} else if text, below := strings.CutPrefix(line, "    \t"); below && len(options) > 0 {
			last := &options[len(options)-1]
			last.usage = strings.TrimSpace(last.usage + " " + text)
		}
	}
	options = slices.DeleteFunc(options, func(o option) bool { return o.name == "help" || o.name == "version" })
	for i := range options {
		if m := standard.FindStringSubmatch(options[i].usage); m != nil {
			options[i].usage, options[i].standard = m[1], strings.Trim(m[2], `"`)
		}
	}
	slices.SortFunc(options, func(a, b option) int { return strings.Compare(a.name, b.name) })
	return options
}

func section(w io.Writer, binary, prefix string, options []option) {
	fmt.Fprintf(w, "\n## %s\n\n", binary)
	fmt.Fprintln(w, "| flag | environment variable | default | what it does |")
	fmt.Fprintln(w, "|---|---|---|---|")
	for _, o := range options {
		variable := prefix + strings.ToUpper(strings.ReplaceAll(o.name, "-", "_"))
		fmt.Fprintf(w, "| `--%s`%s | `%s` | %s | %s |\n", o.name, spaced(o.kind), variable, code(o.standard), cell(o.usage))
	}
}

func spaced(kind string) string {
	if kind == "" {
		return ""
	}
	return " " + cell(kind)
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + cell(text) + "`"
}

// cell is text that is safe in a table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(text)
}
