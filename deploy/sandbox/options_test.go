package sandbox

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestOptionsAreCompleted(t *testing.T) {
	t.Chdir("internal/pki")
	root, err := filepath.Abs("../../../..")
	if err != nil {
		t.Fatal(err)
	}
	options := Options{WithoutAgent: true}
	if err := options.complete(); err != nil {
		t.Fatal(err)
	}
	if options.Name != DefaultName || options.Root != root || options.StateDir != filepath.Join(root, ".sandbox", DefaultName) {
		t.Errorf("got %+v", options)
	}
	if !options.WithoutShim {
		t.Error("a shim without its agent")
	}
	options = Options{HubOnly: true}
	if err := options.complete(); err != nil || !options.WithoutShim || options.WithoutAgent {
		t.Errorf("of a hub only, got %+v, %v", options, err)
	}
}

func TestASpokeOfAnothersHubTakesThatHubAsItIs(t *testing.T) {
	good := Options{Name: "second", HubOf: "first", Root: t.TempDir()}
	if err := good.complete(); err != nil || good.Cluster != "second" || good.Agents != 0 {
		t.Errorf("got %+v, %v", good, err)
	}
	for name, options := range map[string]Options{
		"own hub":   {Name: "first", HubOf: "first"},
		"topology":  {Name: "second", HubOf: "first", Topology: Joined},
		"hub only":  {Name: "second", HubOf: "first", HubOnly: true},
		"agents":    {Name: "second", HubOf: "first", Agents: 2},
		"arguments": {Name: "second", HubOf: "first", AgentArgs: []string{"--v=1"}},
		"no agent":  {Name: "second", HubOf: "first", WithoutAgent: true},
		"authority": {Name: "second", HubOf: "first", Authority: &Authority{}},
		"audit":     {Name: "second", HubOf: "first", AuditHub: true},
		"class":     {Name: "second", HubOf: "first", TopologyVersion: "v1.36.2"},
		"webhooks":  {Name: "second", HubOf: "first", SeparateWebhooks: true},
	} {
		options.Root = t.TempDir()
		if err := options.complete(); err == nil || !strings.Contains(err.Error(), "first") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestOptionsOutsideOfTheRepository(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := new(Options).complete(); err == nil {
		t.Error("a repository was found")
	}
	options := Options{Root: t.TempDir(), StateDir: "relative"}
	if err := options.complete(); err != nil || !filepath.IsAbs(options.StateDir) {
		t.Errorf("got %+v, %v", options, err)
	}
}

func TestNamesThatCannotBeAFolderAreRefused(t *testing.T) {
	for _, name := range []string{"a/b", "..", "A", "-a", "a-", "a b", strings.Repeat("a", 41)} {
		options := Options{Name: name, Root: t.TempDir()}
		if err := options.complete(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: got %v", name, err)
		}
	}
	options := Options{Name: strings.Repeat("a", 40), Root: t.TempDir()}
	if err := options.complete(); err != nil {
		t.Error(err)
	}
}
