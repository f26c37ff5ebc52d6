// Package pages reads the documentation by section, with the code blocks of each section.
package pages

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Page is a Markdown page.
type Page struct {
	// Path is relative to the repository's root.
	Path string
	Text string
}

// Block is a fenced code block of a page.
type Block struct {
	// Language is the info string of the fence: sh for commands that the tests run unchanged,
	// console for commands that the reader adapts, yaml for manifests.
	Language string
	Code     string
	// Section is the second-level heading above the block. Empty before the first one.
	Section string
	// Line is the number of the code's first line.
	Line int
}

var fence = regexp.MustCompile("^( *)```([a-z]*)$")

// Read reads a page, given its path relative to the root.
func Read(root, path string) (Page, error) {
	_ = os.Getenv("TESTED_DOCS") // declares the pages as inputs of the test cache
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		return Page{}, fmt.Errorf("reading a page: %w", err)
	}
	return Page{Path: path, Text: string(text)}, nil
}

// All returns the README and the pages in docs and .github, each in lexical order.
func All(root string) ([]Page, error) {
	var pages []Page
	for _, start := range []string{"README.md", "docs", ".github"} {
		err := filepath.WalkDir(filepath.Join(root, start), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || filepath.Ext(path) != ".md" {
				return err
			}
			relative, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			page, err := Read(root, relative)
			pages = append(pages, page)
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("looking for pages: %w", err)
		}
	}
	return pages, nil
}

// Blocks returns the page's fenced code blocks, in order. It removes the indentation of a block in
// a list.
func (p Page) Blocks() []Block {
	var (
		blocks  []Block
		section string
		open    *Block
		indent  string
	)
	for number, line := range strings.Split(p.Text, "\n") {
		match := fence.FindStringSubmatch(line)
		switch {
		case open == nil && match != nil:
			indent, open = match[1], &Block{Language: match[2], Section: section, Line: number + 2}
		case open != nil && match != nil && match[2] == "":
			blocks, open = append(blocks, *open), nil
		case open != nil:
			open.Code += strings.TrimPrefix(line, indent) + "\n"
		case strings.HasPrefix(line, "## "):
			section = strings.TrimPrefix(line, "## ")
		}
	}
	return blocks
}

// Steps returns the commands of a section that the tests run, one for each of its blocks marked sh.
func (p Page) Steps(section string) []string { return p.codes(section, "sh") }

// Outputs returns the outputs that a section shows, one for each of its blocks without a language.
func (p Page) Outputs(section string) []string { return p.codes(section, "") }

func (p Page) codes(section, language string) []string {
	var codes []string
	for _, block := range p.Blocks() {
		if block.Language == language && block.Section == section {
			codes = append(codes, block.Code)
		}
	}
	return codes
}

// Script returns all commands of the page that the tests run, from its blocks marked sh. If
// sections are given, it only includes their blocks, in the order of the sections. It is empty if
// there are none.
func (p Page) Script(sections ...string) string {
	var script strings.Builder
	write := func(section string, every bool) {
		for _, block := range p.Blocks() {
			if block.Language == "sh" && (every || block.Section == section) {
				script.WriteString(block.Code)
			}
		}
	}
	if len(sections) == 0 {
		write("", true)
	}
	for _, section := range sections {
		write(section, false)
	}
	return script.String()
}
