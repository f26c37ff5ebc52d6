// Package manifests contains manifests as users of the product write them, and applies them like
// kubectl does.
package manifests

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/samber/lo"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

//go:embed fleet peer crowd broken sizes fit labelled life move scaled kaito
var files embed.FS

// The files. Fleet is the demo's. Peer is what a user of karpenter-provider-cluster-api brings
// along. Crowd is for many machines at once. Broken is full of mistakes. Sizes is for choices by
// price. Fit is for random machines and pods. Labelled is for the labels of Nodes. Life is for one
// Node that is disturbed. Move is for a Cluster that moves to another hub. Scaled is for the
// cluster-autoscaler. Kaito is what KAITO makes for a model.
const (
	FleetHub      = "fleet/hub.yaml"
	FleetSpoke    = "fleet/spoke.yaml"
	FleetWorkload = "fleet/workload.yaml"
	PeerHub       = "peer/hub.yaml"
	PeerSpoke     = "peer/spoke.yaml"
	PeerWorkload  = "peer/workload.yaml"
	CrowdHub      = "crowd/hub.yaml"
	CrowdSpoke    = "crowd/spoke.yaml"
	CrowdWorkload = "crowd/workload.yaml"
	BrokenHub     = "broken/hub.yaml"
	BrokenSpoke   = "broken/spoke.yaml"
	LabelledHub   = "labelled/hub.yaml"
	LabelledSpoke = "labelled/spoke.yaml"
	LifeHub       = "life/hub.yaml"
	LifeSpoke     = "life/spoke.yaml"
	MoveHub       = "move/hub.yaml"
	MoveSpoke     = "move/spoke.yaml"
	MoveWorkload  = "move/workload.yaml"
	FitSpoke      = "fit/spoke.yaml"
	ScaledHub     = "scaled/hub.yaml"
	SizesHub      = "sizes/hub.yaml"
	SizesSpoke    = "sizes/spoke.yaml"
	SizesWorkload = "sizes/workload.yaml"

	ScaledWorkload = "scaled/workload.yaml"
	KaitoHub       = "kaito/hub.yaml"
	KaitoSpoke     = "kaito/spoke.yaml"
	KaitoWorkload  = "kaito/workload.yaml"
)

const (
	owner        = client.FieldOwner("kubectl")
	pollInterval = 200 * time.Millisecond
)

// Load returns the objects of a file, in order.
func Load(file string) ([]*unstructured.Unstructured, error) {
	data, err := files.ReadFile(file)
	if err != nil {
		return nil, err
	}
	objects, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", file, err)
	}
	return objects, nil
}

// LoadAs returns the objects of a file, with every string that equals the first name of a pair
// replaced by the second.
func LoadAs(file string, pairs ...string) ([]*unstructured.Unstructured, error) {
	objects, err := Load(file)
	if err != nil {
		return nil, err
	}
	replacer := strings.NewReplacer(lo.Map(pairs, func(name string, _ int) string { return strconv.Quote(name) })...)
	for _, o := range objects {
		text, err := json.Marshal(o.Object)
		if err != nil {
			return nil, err
		}
		o.Object = nil
		if err := json.Unmarshal([]byte(replacer.Replace(string(text))), &o.Object); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// Parse returns the objects of a YAML stream.
func Parse(data []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		object := &unstructured.Unstructured{}
		switch err := decoder.Decode(object); {
		case errors.Is(err, io.EOF):
			return objects, nil
		case err != nil:
			return nil, err
		case len(object.Object) > 0:
			objects = append(objects, object)
		}
	}
}

// Apply applies the file like kubectl apply --server-side, with strict validation of field names.
func Apply(ctx context.Context, c client.Client, file string) error {
	objects, err := Load(file)
	if err != nil {
		return err
	}
	return ApplyObjects(ctx, c, objects...)
}

// ApplyObjects applies objects like [Apply]. It does not modify them.
func ApplyObjects(ctx context.Context, c client.Client, objects ...*unstructured.Unstructured) error {
	strict := client.WithFieldValidation(c, metav1.FieldValidationStrict)
	for _, object := range objects {
		if err := strict.Apply(ctx, client.ApplyConfigurationFromUnstructured(object.DeepCopy()), owner); err != nil {
			return fmt.Errorf("applying %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}

// Delete deletes the objects of the file, and waits until they are gone. Missing objects are not an
// error.
func Delete(ctx context.Context, c client.Client, file string) error {
	objects, err := Load(file)
	if err != nil {
		return err
	}
	return DeleteObjects(ctx, c, objects...)
}

// DeleteObjects deletes objects like [Delete].
func DeleteObjects(ctx context.Context, c client.Client, objects ...*unstructured.Unstructured) error {
	for _, object := range objects {
		if err := client.IgnoreNotFound(c.Delete(ctx, object)); err != nil {
			return fmt.Errorf("deleting %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	for _, object := range objects {
		err := wait.PollUntilContextCancel(ctx, pollInterval, true, func(ctx context.Context) (bool, error) {
			err := c.Get(ctx, client.ObjectKeyFromObject(object), object)
			return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
		})
		if err != nil {
			return fmt.Errorf("waiting until %s %s is gone: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return nil
}
