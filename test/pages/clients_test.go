package pages_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	. "github.com/onsi/gomega"

	"github.com/karpenter-capi/karpenter-capi/test/pages"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// What the page shows is what package foreign runs.
func TestTheCodeOfThePageOnClientsIsThatOfTheExamples(t *testing.T) {
	g := NewWithT(t)
	page, err := pages.Read(root(t), "docs/clients.md")
	g.Expect(err).NotTo(HaveOccurred())
	shown := map[string]int{}
	for _, block := range page.Blocks() {
		file, is := map[string]string{"go": "docs/examples/go/main.go", "python": "docs/examples/python/claimer.py"}[block.Language]
		if !is {
			continue
		}
		shown[file]++
		source, err := os.ReadFile(filepath.Join(root(t), file))
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(contains(string(source), block.Code)).To(BeTrue(), "%s is not in %s:\n%s", at(page, block), file, block.Code)
	}
	g.Expect(shown).To(HaveLen(2))
	for file, blocks := range shown {
		g.Expect(blocks).To(BeNumerically(">=", 4), file)
	}
}

// contains reports whether the source has the lines of the code in one piece, all indented by the same.
func contains(source, code string) bool {
	first, _, _ := strings.Cut(code, "\n")
	for _, match := range regexp.MustCompile(`(?m)^([\t ]*)`+regexp.QuoteMeta(first)+"$").FindAllStringSubmatch(source, -1) {
		var indented strings.Builder
		for line := range strings.Lines(code) {
			if line != "\n" {
				indented.WriteString(match[1])
			}
			indented.WriteString(line)
		}
		if strings.Contains("\n"+source, "\n"+indented.String()) {
			return true
		}
	}
	return false
}

func TestCodeIsFoundWithAnyIndentation(t *testing.T) {
	g := NewWithT(t)
	source := "a\n\tb\n\n\t\tc\nd\n"
	g.Expect(contains(source, "b\n\n\tc\n")).To(BeTrue())
	g.Expect(contains(source, "a\n\tb\n")).To(BeTrue())
	g.Expect(contains(source, "b\n\tc\n")).To(BeFalse())
	g.Expect(contains(source, "b\n\n\tc\nd\n")).To(BeFalse())
	g.Expect(contains("ab\n", "b\n")).To(BeFalse(), "part of a line")
}

// A field that is added to NodeGroup has to be explained as a part of an offering.
func TestEveryFieldOfANodeGroupIsAPartOfAnOffering(t *testing.T) {
	g := NewWithT(t)
	page, err := pages.Read(root(t), "docs/clients.md")
	g.Expect(err).NotTo(HaveOccurred())
	_, section, found := strings.Cut(page.Text, "\n## A node group is an offering\n")
	g.Expect(found).To(BeTrue())
	section, _, _ = strings.Cut(section, "\n## ")

	var documented, parts []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (\\w+) \\| .+ \\|$").FindAllStringSubmatch(section, -1) {
		documented, parts = append(documented, row[1]), append(parts, row[2])
	}
	var fields []string
	described := (&agentv1alpha1.NodeGroup{}).ProtoReflect().Descriptor().Fields()
	for i := range described.Len() {
		fields = append(fields, string(described.Get(i).Name()))
	}
	g.Expect(documented).To(ConsistOf(fields), "the lines of the table, one for each field of NodeGroup")
	for i, part := range parts {
		g.Expect([]string{"topology", "weight", "capacity", "resources", "identity", "revision", "provenance"}).To(ContainElement(part), documented[i])
	}
	g.Expect(parts).To(ContainElements("topology", "weight", "capacity", "resources"))
}
