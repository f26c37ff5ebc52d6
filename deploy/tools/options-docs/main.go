// Command options-docs writes the reference of the binaries' options from what they print with
// --help, as packages flag and github.com/spf13/pflag format it. The commands of a binary are those
// that github.com/spf13/cobra lists there.
//
//	options-docs docs/options.md <binary>:<prefix of its environment variables>[:all] …
//
// Cobra's own generator is not used: it writes a page for each command, without environment
// variables, and does not see the shim's flags, which Karpenter core defines with package flag.
//
// With all, the flags of commands can be set by environment variables, too. Otherwise only those of
// the binary itself can.
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
		fmt.Fprintln(os.Stderr, "usage: options-docs <file> <binary>:<environment prefix>[:all] …")
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
	fmt.Fprintln(&page, "Every option can be set by a flag or by the environment variable beside it. The flag takes precedence. Options of commands")
	fmt.Fprintln(&page, "without such a column are set by their flags only.")
	for _, argument := range binaries {
		binary, environment, _ := strings.Cut(argument, ":")
		prefix, scope, _ := strings.Cut(environment, ":")
		usage, err := help(binary)
		if err != nil {
			return err
		}
		options := parse(usage)
		if len(options) == 0 {
			return fmt.Errorf("%s --help shows no options:\n%s", binary, usage)
		}
		fmt.Fprintf(&page, "\n## %s\n", filepath.Base(binary))
		table(&page, variables(prefix), options)
		variable := variables(prefix)
		if scope != "all" {
			variable = nil
		}
		if err := sections(&page, variable, binary, nil, usage); err != nil {
			return err
		}
	}
	return os.WriteFile(file, page.Bytes(), 0o644)
}

// sections writes a section for each command below the one whose help is given.
func sections(page io.Writer, variable func(string) string, binary string, path []string, usage string) error {
	for _, name := range commands(usage) {
		below := append(slices.Clone(path), name)
		usage, err := help(binary, below...)
		if err != nil {
			return err
		}
		line := usageLine(usage)
		if line == "" {
			return fmt.Errorf("%s %s --help has no usage:\n%s", binary, strings.Join(below, " "), usage)
		}
		options := parse(usage)
		nested := commands(usage)
		if len(options) > 0 || len(nested) == 0 {
			fmt.Fprintf(page, "\n### %s %s\n\n`%s`\n\n%s\n", filepath.Base(binary), strings.Join(below, " "), line, escaped(summary(usage)))
			if len(options) > 0 {
				table(page, variable, options)
			}
		}
		if err := sections(page, variable, binary, below, usage); err != nil {
			return err
		}
	}
	return nil
}

// help returns what the binary, or its command, prints with --help, without anything that its
// environment could put into the defaults.
func help(binary string, path ...string) (string, error) {
	command := exec.Command(binary, append(path, "--help")...)
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
	// cobra: "  name        What it does", below "Available Commands:".
	command = regexp.MustCompile(`^ {2}([a-z][a-z0-9-]*) {2,}\S`)

	standard = regexp.MustCompile(`(?s)^(.*?)\s*\(default (.*)\)$`)
)

// parse reads options in either format, but not those that a command inherits.
func parse(usage string) []option {
	var options []option
	usage, _, _ = strings.Cut(usage, "\nGlobal Flags:\n")
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

// commands returns the names of the commands that a help text lists, except for those that cobra
// adds.
func commands(usage string) []string {
	_, list, _ := strings.Cut(usage, "\nAvailable Commands:\n")
	var names []string
	for line := range strings.Lines(list) {
		m := command.FindStringSubmatch(line)
		if m == nil {
			break
		}
		if m[1] != "completion" && m[1] != "help" {
			names = append(names, m[1])
		}
	}
	return names
}

// usageLine returns how a command is called.
func usageLine(usage string) string {
	_, below, _ := strings.Cut(usage, "\nUsage:\n")
	line, _, _ := strings.Cut(below, "\n")
	return strings.TrimSpace(line)
}

// summary returns the first paragraph of a help text, as a sentence.
func summary(usage string) string {
	text, _, _ := strings.Cut(usage, "\n\n")
	text = strings.Join(strings.Fields(text), " ")
	if strings.HasSuffix(text, ":") {
		text = text[:strings.LastIndex(text, ".")+1]
	}
	if text != "" && !strings.HasSuffix(text, ".") {
		text += "."
	}
	return text
}

// variables returns the function from a flag's name to its environment variable.
func variables(prefix string) func(string) string {
	return func(flag string) string { return prefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }
}

// table writes the options. Without variable, they have no environment variables.
func table(w io.Writer, variable func(string) string, options []option) {
	if variable == nil {
		fmt.Fprint(w, "\n| flag | default | what it does |\n|---|---|---|\n")
	} else {
		fmt.Fprint(w, "\n| flag | environment variable | default | what it does |\n|---|---|---|---|\n")
	}
	for _, o := range options {
		dashes := "--"
		if len(o.name) == 1 {
			dashes = "-"
		}
		fmt.Fprintf(w, "| `%s%s`%s | ", dashes, o.name, spaced(o.kind))
		if variable != nil {
			fmt.Fprintf(w, "`%s` | ", variable(o.name))
		}
		fmt.Fprintf(w, "%s | %s |\n", code(o.standard), escaped(o.usage))
	}
}

func spaced(kind string) string {
	if kind == "" {
		return ""
	}
	return " " + escaped(kind)
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + escaped(text) + "`"
}

// escaped is text that is safe in a table.
func escaped(text string) string {
	return strings.NewReplacer("|", `\|`, "<", "&lt;", "\n", " ").Replace(text)
}
