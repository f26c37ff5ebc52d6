package manifests

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Create creates the objects and their namespaces, and waits until the kinds among them are served.
func Create(ctx context.Context, c client.Client, objects ...client.Object) error {
	namespaces := map[string]bool{"": true}
	var crds []client.ObjectKey
	for _, o := range objects {
		if namespace := o.GetNamespace(); !namespaces[namespace] {
			namespaces[namespace] = true
			err := c.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})
			if err != nil && !apierrors.IsAlreadyExists(err) {
				return fmt.Errorf("creating namespace %s: %w", namespace, err)
			}
		}
		if err := c.Create(ctx, o); err != nil {
			return fmt.Errorf("creating %T %s: %w", o, client.ObjectKeyFromObject(o), err)
		}
		if _, ok := o.(*apiextensionsv1.CustomResourceDefinition); ok {
			crds = append(crds, client.ObjectKeyFromObject(o))
		}
	}
	for _, key := range crds {
		if err := waitEstablished(ctx, c, key); err != nil {
			return fmt.Errorf("waiting for %s to be served: %w", key.Name, err)
		}
	}
	return nil
}

func waitEstablished(ctx context.Context, c client.Client, key client.ObjectKey) error {
	return wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := c.Get(ctx, key, crd); err != nil {
			return false, err
		}
		for _, condition := range crd.Status.Conditions {
			if condition.Type == apiextensionsv1.Established {
				return condition.Status == apiextensionsv1.ConditionTrue, nil
			}
		}
		return false, nil
	})
}
