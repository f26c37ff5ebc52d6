// Package nodepoolset turns the entries of a NodePoolSet into the objects that are published to a
// Cluster. The agent and the fake share it, so that both publish the same objects with the same
// problems and revisions.
package nodepoolset

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
)

// These are the kinds of published objects.
const (
	NodePool  = "NodePool"
	NodeClass = "ClusterAPINodeClass"
)

// MaxSpecBytes is the size limit of a spec, in bytes of JSON as [Template.Object] writes it.
const MaxSpecBytes = 32 << 10

// Template is an entry of a NodePoolSet, as a user writes it.
type Template struct {
	// Name is the name of the object in the spoke. REQUIRED.
	Name string `json:"name"`
	// Labels and Annotations are those of the object. If one of them is invalid, the entry is
	// published with a problem, and without its spec.
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Spec is the object's spec, a JSON object. REQUIRED.
	Spec json.RawMessage `json:"spec"`
}

// Object returns what is published of the template: with its spec, or with a problem that begins
// with the field of the template, for example spec.nodePools[0]. Its revision is set.
func (t Template) Object(
	set string, policy agentv1alpha1.DeletionPolicy, kind, field string,
) *agentv1alpha1.PublishedObject {
	object := &agentv1alpha1.PublishedObject{
		Kind: kind, Name: t.Name, Set: set, DeletionPolicy: policy, Labels: cloned(t.Labels), Annotations: cloned(t.Annotations),
	}
	spec, problem := t.spec()
	if problem = cmp.Or(t.metadataProblem(), problem); problem != "" {
		object.Problem = field + "." + problem
	} else {
		object.SpecJson = spec
	}
	object.Revision = Revision(object)
	return object
}

// cloned returns nil for an empty map, which has the revision of none.
func cloned(values map[string]string) map[string]string {
	if len(values) == 0 {
		return nil
	}
	return maps.Clone(values)
}

// spec returns the spec that is published, or why it cannot be.
func (t Template) spec() (spec, problem string) {
	spec, err := Canonical(t.Spec)
	switch {
	case err != nil:
		return "", "spec: " + err.Error()
	case len(spec) > MaxSpecBytes:
		return "", fmt.Sprintf("spec: %d bytes of JSON, but at most %d are published", len(spec), MaxSpecBytes)
	}
	return spec, ""
}

// metadataProblem returns the first invalid label or annotation, or nothing.
func (t Template) metadataProblem() string {
	var problems []string
	for key, value := range t.Labels {
		for _, problem := range slices.Concat(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)) {
			problems = append(problems, fmt.Sprintf("labels[%s]: %s", quoted(key), problem))
		}
	}
	for key := range t.Annotations {
		for _, problem := range validation.IsQualifiedName(strings.ToLower(key)) {
			problems = append(problems, fmt.Sprintf("annotations[%s]: %s", quoted(key), problem))
		}
	}
	if len(problems) == 0 {
		return ""
	}
	return slices.Min(problems)
}

// maxQuoted is how many characters of a key a problem quotes. An annotation's key has no limit in a
// NodePoolSet, but conditions, events and reports have.
const maxQuoted = 128

func quoted(key string) string {
	if runes := []rune(key); len(runes) > maxQuoted {
		return string(runes[:maxQuoted]) + "…"
	}
	return key
}

// Canonical returns a JSON object with sorted keys and without spaces, so that the same content has
// the same revision everywhere.
func Canonical(raw []byte) (string, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var spec map[string]any
	if err := decoder.Decode(&spec); err != nil && len(raw) > 0 {
		return "", fmt.Errorf("not a JSON object: %w", err)
	}
	if spec == nil {
		return "", errors.New("is missing; write {} for an empty one")
	}
	encoded, err := json.Marshal(spec)
	return string(encoded), err
}

// Revision identifies the content of an object, its revision excepted.
func Revision(object *agentv1alpha1.PublishedObject) string {
	content, err := json.Marshal([]any{
		object.GetKind(), object.GetName(), object.GetSet(), object.GetLabels(), object.GetAnnotations(), object.GetSpecJson(),
		object.GetDeletionPolicy().String(), object.GetProblem(),
	})
	if err != nil {
		panic(err) // strings always marshal
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:8])
}
